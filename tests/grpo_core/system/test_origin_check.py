"""The names under which a server may be asked; tests/served/test_deployments.py has the pages, and a real server."""

from __future__ import annotations

import socket

import httpx2
import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from grpo_core.system import origin_check as own_pages
from grpo_core.system.origin_check import OwnPagesOnly


def asked(host: str, at: str, **headers: str) -> httpx2.Response:
    """The answer of a server that is reached at the address `at`."""
    server = TestClient(OwnPagesOnly(PlainTextResponse("done")), base_url=f"http://{at}:8000")
    return server.post("/", headers={"Host": host, **headers})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("10.0.0.5:8000", 200),
        ("[fd00::5]:8000", 200),
        ("localhost", 200),
        ("gpu-3:8000", 200),  # without a dot: no domain of anybody's
        (f"{socket.getfqdn()}:8000", 200),
        ("gpu-3.evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("[fd00::5", 403),
        ("", 403),
    ],
)
@pytest.mark.parametrize("at", ["10.0.0.5", "[fd00::5]", "[::ffff:10.0.0.5]"])
def test_a_server_in_a_network_is_asked_by_address_or_by_a_name_of_its_own(host: str, status: int, at: str) -> None:
    assert asked(host, at).status_code == status
    if status == 200:
        assert asked(host, at, Origin=f"http://{host}").status_code == 200
        assert asked(host, at, Origin="http://gpu-4:8000").status_code == 403


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("127.0.0.1", 200),
        ("127.8.9.1:8000", 200),
        ("[::1]:8000", 200),
        ("[::ffff:127.0.0.1]:8000", 200),
        ("localhost:8000", 200),
        ("LOCALHOST:8000", 200),
        ("evil:8000", 403),  # the local network's DNS may point it here
        ("gpu-3.lan:8000", 403),
        ("localhost.:8000", 403),
        ("10.0.0.5:8000", 403),
        ("evil.example:8000", 403),
        ("", 403),
    ],
)
@pytest.mark.parametrize("at", ["127.0.0.1", "127.0.1.1", "[::1]", "[::ffff:127.0.0.1]"])
def test_a_server_on_a_loopback_address_is_asked_by_such_an_address_or_as_localhost(
    monkeypatch: pytest.MonkeyPatch, host: str, status: int, at: str
) -> None:
    monkeypatch.setattr(own_pages, "_full_names", lambda: {"gpu-3.lan"})
    assert asked(host, at).status_code == status
    assert asked(host, at, Origin=f"http://{host}").status_code == status
    assert asked(host, at, Origin="http://evil:8000").status_code == 403


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("name", "foreign"), [("Host", "evil.example:8000"), ("Origin", "http://evil.example:8000")])
def test_a_request_with_two_hosts_or_origins_is_refused(name: str, foreign: str, order: int) -> None:
    server = TestClient(OwnPagesOnly(PlainTextResponse("done")), base_url="http://127.0.0.1:8000")
    own = {"Host": "127.0.0.1:8000", "Origin": "http://127.0.0.1:8000"}
    assert server.post("/", headers=own).status_code == 200
    twice = [(name, own[name]), (name, foreign)][::order]
    others = [(other, value) for other, value in own.items() if other != name]
    assert server.post("/", headers=[*others, *twice]).status_code == 403
