"""A server with a secret answers its trainer alone."""

from __future__ import annotations

import importlib
import itertools

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from grpo_core.config.files import parse_config
from grpo_core.errors import ConfigError
from grpo_core.rollout.vllm.binary import PATH
from grpo_core.rollout.vllm.secret import SECRET, with_secret
from grpo_core.rollout.vllm.secret_required import SecretRequired
from grpo_core.rollout.vllm.serve import server_command
from tests.conftest import config_values


@pytest.mark.parametrize(
    ("given", "status"),
    [("Bearer right", 200), ("bearer right", 401), ("Bearer wrong", 401), ("Bearer right ü", 401), (None, 401)],
)
@pytest.mark.parametrize("path", ["/health", "/update_weights"])
def test_a_request_without_the_secret_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: str | None, status: int, path: str
) -> None:
    monkeypatch.setenv(SECRET, "right")
    server = TestClient(SecretRequired(PlainTextResponse("done")))
    headers = {} if given is None else {"Authorization": given.encode()}
    assert server.post(path, headers=headers).status_code == status
    assert server.post(path, headers=with_secret()).status_code == 200


def test_a_server_without_a_secret_asks_for_none(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    config = parse_config(config_values(tmp_path, tmp_path, engine="vllm-server"))
    guard = "grpo_core.rollout.vllm.secret_required.SecretRequired"
    monkeypatch.delenv(SECRET, raising=False)
    assert with_secret() == {}
    assert guard not in server_command(config)
    monkeypatch.setenv(SECRET, "right")
    assert guard in server_command(config)
    assert "right" not in " ".join(server_command(config)), "every user sees a command line"
    monkeypatch.setenv(SECRET, " ")
    for asked in (with_secret, lambda: server_command(config)):  # a server without a guard is not what was meant
        with pytest.raises(ConfigError, match="holds nothing but white space"):
            asked()


def test_completions_as_bytes_are_behind_the_secret_and_the_check_of_pages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    """vLLM adds each middleware around those before it."""
    monkeypatch.setenv(SECRET, "right")
    command = server_command(parse_config(config_values(tmp_path, tmp_path, engine="vllm-server")))
    app = Starlette()
    for option, value in itertools.pairwise(command):
        if option == "--middleware":
            module, _, name = value.rpartition(".")
            app.add_middleware(getattr(importlib.import_module(module), name))
    server = TestClient(app, base_url="http://127.0.0.1", client=("127.0.0.1", 1))
    assert server.post(PATH, content="unreadable").status_code == 401
    assert server.post(PATH, content="unreadable", headers={**with_secret(), "Origin": "http://x"}).status_code == 403
    with pytest.raises(ValueError):  # of the completions' own middleware
        server.post(PATH, content="unreadable", headers=with_secret())
