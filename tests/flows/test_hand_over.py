"""What outlasts others: a flow that waits for another deployment's flow run Prefect's server, and hears what that says;
a process that serves its output."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import httpx2
import pytest
from prefect.client.schemas import FlowRun
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError, TerminationSignal
from prefect.states import Completed, Failed, Running, State

from benchmarks.command import ROOT
from flows import pipeline

LOG = logging.getLogger("hand_over")


class OtherClientError(Exception):
    """Error of an HTTP client that Prefect may use one day."""


def run_in(state: State | None) -> FlowRun:
    return FlowRun(id=uuid.UUID(int=1), flow_id=uuid.UUID(int=2), state=state)


class Client:
    """Gives or raises what it is told, one after the other, and keeps which flow runs it was asked for."""

    def __init__(self, *answers: FlowRun | BaseException):
        self.answers, self.asked = list(answers), []

    def read_flow_run(self, flow_run_id: uuid.UUID) -> FlowRun:
        self.asked.append(flow_run_id)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "POLL_SECONDS", 0)


def wait(client: Any) -> FlowRun:
    return pipeline._wait_for(client, run_in(None), LOG)


@pytest.mark.parametrize("end", [Completed(), Failed()])
def test_the_flow_run_is_read_until_it_has_ended(end: State) -> None:
    client = Client(run_in(None), run_in(Running()), run_in(end))
    assert wait(client).state == end
    assert client.asked == [uuid.UUID(int=1)] * 3


def test_a_server_that_is_away_is_waited_for_whatever_its_client_raises(caplog: pytest.LogCaptureFixture) -> None:
    """Each absence is reported once."""
    away = [httpx2.ConnectError("refused"), OtherClientError("reset by peer"), ConnectionResetError()]
    client = Client(*away, run_in(Running()), OtherClientError("again"), run_in(Completed()))
    ended = wait(client)
    assert ended.state and ended.state.is_completed()
    assert [record.getMessage() for record in caplog.records] == [
        f"flow run {uuid.UUID(int=1)} cannot be read: {error!r}; waiting for Prefect's server"
        for error in (away[0], OtherClientError("again"))
    ]


def refused() -> PrefectHTTPStatusError:
    request = httpx2.Request("GET", "http://127.0.0.1/api/flow_runs/1")
    response: Any = httpx2.Response(403, request=request)
    return PrefectHTTPStatusError("forbidden", request=request, response=response)


@pytest.mark.parametrize("error", [ObjectNotFound(Exception("deleted")), refused(), TerminationSignal(15)])
def test_a_refusal_or_a_signal_ends_the_wait(error: BaseException) -> None:
    with pytest.raises(type(error)):
        wait(Client(error, run_in(Completed())))


PROGRAM = """
import os, sys
from flows.serving.output import outlive_output
outlive_output()
for number in range(3):
    print("printed", number)
    print("said", number, file=sys.stderr)
os._exit(3)  # by now all of it has left the process
"""


@pytest.mark.parametrize("lost", ["stdout", "stderr"])
@pytest.mark.parametrize("to", ["a full disk", "a closed pipe"])
def test_output_that_cannot_be_written_is_lost_and_ends_nothing(to: str, lost: str, tmp_path: Path) -> None:
    closed, broken = os.pipe()
    os.close(closed)
    with Path("/dev/full").open("w") as full, os.fdopen(broken, "w") as pipe, (tmp_path / "log").open("w") as log:
        files = {"stdout": log, "stderr": log, lost: full if to == "a full disk" else pipe}
        done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, **files)
    word = {"stdout": "said", "stderr": "printed"}[lost]
    assert done.returncode == 3
    assert (tmp_path / "log").read_text() == "".join(f"{word} {number}\n" for number in range(3))
