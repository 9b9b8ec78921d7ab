"""A judge's key goes to its server alone, and is in no error, log or file."""

from __future__ import annotations

import logging
import socketserver
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from grpo_core.errors import RewardError
from tests.grpo_core.rewards.judging import by_length, contents, judging
from tests.serving import free_ports

KEY = "sk-secret-1234-of-some-length"
LEAKS: dict[str, tuple[str, Any]] = {
    "its variable ends in a line break": (f"{KEY}\n", (401, {"error": {"message": f"bad key {KEY}"}})),
    "an error across the cut": (KEY, (401, {"error": {"message": "x" * 470 + KEY}})),
    "a refused question": (KEY, (400, {"error": {"message": f"Bearer {KEY}"}})),
    "a redirect": (KEY, (302, f"go to /?key={KEY}".encode(), {"Location": f"/?key={KEY}"})),
    "no grade": (KEY, f"You sent {KEY} and {'x' * 445}{KEY}"),
    "a grade": (KEY, f"You sent {KEY}.\nScore: 10"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("value", "said"), LEAKS.values(), ids=LEAKS)
@pytest.mark.filterwarnings("ignore:the judge .* refuses")
def test_a_key_that_the_server_gives_back_is_in_no_error_log_or_file(
    graded: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    value: str,
    said: Any,
) -> None:
    monkeypatch.setenv("TEST_JUDGE_API_KEY", value)
    caplog.set_level(logging.INFO)
    shown = []
    with judging(lambda *_: said) as server:
        for number in range(20):
            try:
                graded(server.url, f"reply {number}", api_key_env="TEST_JUDGE_API_KEY")
            except RewardError as error:
                shown.append("".join(traceback.format_exception(error)))
                break
        assert {sent["authorization"] for sent in server.headers} == {f"Bearer {KEY}"}
    stored = contents(tmp_path / "cache")
    assert shown or "You sent $TEST_JUDGE_API_KEY.\nScore: 10" in stored.values()
    assert KEY[:8] not in f"{shown}{caplog.text}{stored}"


@pytest.mark.parametrize("value", ["0", "e", "10", "Score:"])
def test_a_key_that_is_a_part_of_what_the_judge_says_changes_no_grade(
    graded: Any, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("TEST_JUDGE_API_KEY", value)
    with judging(lambda *_: "Here it is.\nScore: 10") as server:
        for _ in range(2):  # the second is the stored one
            assert graded(server.url, "a", api_key_env="TEST_JUDGE_API_KEY") == [1]
        assert len(server.questions) == 1


@pytest.mark.parametrize("value", ["sk-sé", "sk-se cret", "sk-sec\nret", "sk-s\x7fret", 'sk-s"ecret', "sk-s\\ecret"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(
    graded: Any, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("TEST_JUDGE_API_KEY", value)
    with judging(by_length) as server:
        with pytest.raises(RewardError, match="the value of TEST_JUDGE_API_KEY has a space, quote") as error:
            graded(server.url, "a", api_key_env="TEST_JUDGE_API_KEY")
        assert server.questions == []
    assert "sk-s" not in "".join(traceback.format_exception(error.value))


@contextmanager
def recording() -> Iterator[tuple[str, list[bytes]]]:
    """A proxy's address, and the beginnings of what it is sent; it refuses to pass anything on."""
    received: list[bytes] = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            received.append(self.request.recv(65536))
            self.request.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", received
        finally:
            server.shutdown()


def test_a_proxy_sees_the_key_of_no_server(graded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_JUDGE_API_KEY", KEY)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with recording() as (proxy, received), judging(lambda *_: "Score: 10") as server:
        for scheme in ("http", "https", "all"):
            monkeypatch.setenv(f"{scheme}_proxy", proxy)
        port = urlsplit(server.url).port
        # Linux takes 0.0.0.0 for this machine, and no client does.
        for number, host in enumerate(["127.0.0.1", "localhost", "0.0.0.0"]):
            assert graded(f"http://{host}:{port}/v1", f"reply {number}", api_key_env="TEST_JUDGE_API_KEY") == [1]
        with pytest.raises(RewardError, match="does not answer"):  # there is none
            graded(f"https://127.0.0.1:{free_ports(1)[0]}/v1", "a", api_key_env="TEST_JUDGE_API_KEY")
        assert received == [], "what is not encrypted, or is on this machine, is asked directly"
        with pytest.raises(RewardError, match="does not answer"):
            graded("https://judge.invalid/v1", "a", api_key_env="TEST_JUDGE_API_KEY")
    assert all(sent.startswith(b"CONNECT judge.invalid:443 ") and KEY.encode() not in sent for sent in received)
    assert received


def test_keys_of_other_servers_are_not_sent_along(graded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-other-5678")
    for name in ("OPENAI_ORG_ID", "OPENAI_PROJECT_ID", "OPENAI_ADMIN_KEY", "OPENAI_WEBHOOK_SECRET"):
        monkeypatch.setenv(name, "sk-other-5678")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Gateway: sk-other-5678\nAuthorization: Bearer sk-other-5678")
    with judging(lambda *_: "Score: 10") as server:
        graded(server.url, "c")
    [sent] = server.headers
    assert sent["authorization"] == "Bearer none"
    assert "sk-other-5678" not in str(sent), "other servers' secrets are not sent along"
