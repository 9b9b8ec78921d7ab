"""The names under which a server may be asked; tests/flows/test_deployments.py has the pages, and a real server."""

from __future__ import annotations

import socket

import pytest
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from grpo_core.own_pages import OwnPagesOnly


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
def test_a_server_is_asked_by_address_or_by_a_name_of_its_own(host: str, status: int) -> None:
    server = TestClient(OwnPagesOnly(PlainTextResponse("done")))
    assert server.post("/", headers={"Host": host}).status_code == status
    if status == 200:
        assert server.post("/", headers={"Host": host, "Origin": f"http://{host}"}).status_code == 200
        assert server.post("/", headers={"Host": host, "Origin": "http://gpu-4:8000"}).status_code == 403
