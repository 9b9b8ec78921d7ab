"""Environments that misbehave: the others go on, the policy is told or the conversation fails, and nothing is left."""

from __future__ import annotations

import fcntl
import resource
import socket
from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_core.config.environment import EnvironmentConfig
from grpo_core.environments import processes
from grpo_core.environments.conversation import Conversation, converse
from grpo_core.environments.processes import Environments, Seen
from grpo_core.environments.registry import EnvironmentsError
from grpo_core.rollout.conversations import play
from grpo_core.rollout.types import Sampling
from tests.grpo_core.environments.scripted import Scripted, call, turns
from tests.processes import existing

pytestmark = pytest.mark.served
HERE = "tests.grpo_core.environments.attacking"
FORMAT = turns()
SECONDS = 4.0  # for a call; many begin together


@pytest.fixture
def marks(tmp_path: Path) -> Iterator[Path]:
    """A file for the ids of processes; none of them runs at the end."""
    file = tmp_path / "processes"
    file.touch()
    yield file
    alive = _running(file)
    _, left = psutil.wait_procs(alive, timeout=60)
    assert left == []


def _running(file: Path) -> list[psutil.Process]:
    return existing(map(int, file.read_text().split()))


@pytest.fixture(scope="module")
def kept() -> Iterator[Environments]:
    """For tests that do no harm."""
    factories = {name: f"{HERE}:{name}" for name in ("Attacking", "Deep")}
    started = Environments(EnvironmentConfig(environment_factory=factories, tool_timeout=SECONDS))
    yield started
    started.close()


def _environments(name: str = "Attacking", **keys: Any) -> Environments:
    return Environments(EnvironmentConfig(**{"environment_factory": f"{HERE}:{name}", "tool_timeout": SECONDS, **keys}))


def _hold(environments: Environments, scripts: list[list[str]], marks: Path, **columns: Any) -> list[Conversation]:
    rows = [
        {"prompt": [{"role": "user", "content": f"#{place}"}], "path": str(marks), **columns}
        for place in range(len(scripts))
    ]
    plays = [converse(row, 11, 20_000, environments, FORMAT) for row in rows]
    found: dict[int, Conversation] = {}
    for ended in play(Scripted(scripts, FORMAT), plays, [0] * len(plays), Sampling(20_000)):
        found |= dict(ended)
    environments.free_all()
    return [found[place] for place in range(len(scripts))]


LOST, TIME = "its process ended", "its time was up"
WRITTEN = "it wrote into the connection of its process"
ATTACKS = {  # the call, and what the policy is told, or how the conversation fails
    "leaves a daemon": (call("daemon"), "left"),
    "closes everything": (call("close_everything"), f"tool close_everything: {LOST}"),
    "writes what is no answer": (call("write_everywhere", '{"text": "xxxx{]"}'), f"tool write_everywhere: {WRITTEN}"),
    "writes another answer": (
        call("write_everywhere", '{"text": "\\u0000\\u0000\\u0000\\u000b{\\"value\\":3}"}'),
        f"tool write_everywhere: {WRITTEN}",
    ),
    "writes deep JSON": (
        call("write_everywhere", f'{{"text": "\\u0000\\u0000\\u0010\\u0000{"[" * 4096}"}}'),
        f"tool write_everywhere: {WRITTEN}",
    ),
    "prints megabytes": (call("print_megabytes"), "printed"),
    "stops itself": (call("stop"), f"tool stop: {TIME}"),
    "ignores signals": (call("ignore_signals"), f"tool ignore_signals: {TIME}"),
    "exhausts memory": (call("exhaust_memory"), "Error: MemoryError: "),
    "crashes": (call("crash"), f"tool crash: {LOST}"),
    "spawns processes": (call("spawn", '{"count": 30}'), "spawned"),
    "returns twice": (call("return_twice"), "returned"),
    "ends its parent": (call("end_keeper"), f"tool end_keeper: {LOST}"),
    "exits": (call("leave"), "Error: SystemExit: 3"),
    "raises half of a character": (call("surrogate"), "Error: ValueError: \\ud800\0"),
    "is given half of a character": (
        call("write_everywhere", '{"text": "\\ud800"}'),
        "Error: the call holds half of a character (a lone surrogate such as \\ud800)",
    ),
    "is called in the deep": (call("seen", "[" * 12_000), "Error: the call is not valid JSON: it nests too deep"),
    "runs a program": (call("child"), "said\n"),
}


def test_an_attack_ends_its_own_conversation_at_most_and_leaves_nothing(marks: Path) -> None:
    environments = _environments()
    try:
        talks = _hold(environments, [[text, "well"] for text, _ in ATTACKS.values()], marks)
        told = [talk.said.failure or talk.said.messages[1]["content"] for talk in talks]
        assert dict(zip(ATTACKS, told, strict=True)) == {name: answer for name, (_, answer) in ATTACKS.items()}
        for talk in talks:
            assert talk.said.failure or talk.said.messages[-1]["content"] == "well"
        assert len(_running(marks)) > 30  # environments that are kept, and what their tools have started
    finally:
        environments.close()


def test_what_an_environment_has_started_ends_with_it_and_not_with_the_run(marks: Path) -> None:
    environments = _environments(tool_timeout=1.0)
    try:
        _hold(environments, [[call("daemon") + call("spawn", '{"count": 3}') + call("stop")]], marks)
        _, left = psutil.wait_procs(_running(marks), timeout=60)
        assert left == []
    finally:
        environments.close()


def test_the_run_goes_on_after_the_end_of_the_process_that_starts_environments(
    marks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environments = _environments()
    try:
        lost, ended = _hold(environments, [[call("end_starter")], [call("stop")]], marks)
        assert lost.said.failure == f"tool end_starter: {LOST}"
        # It may have ended with the one that starts environments, before its tool was called.
        assert ended.said.failure in (f"tool stop: {LOST}", LOST)
        (again,) = _hold(environments, [[call("child"), "well"]], marks)
        assert again.said.messages[1]["content"] == "said\n"
        assert "it is started again" in capsys.readouterr().out
    finally:
        environments.close()


def test_making_and_resetting_an_environment_has_its_time(marks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environments = _environments("Hanging", tool_timeout=0.5)
    (talk,) = _hold(environments, [["never said"]], marks)
    assert talk.said.failure == TIME
    environments.close()
    monkeypatch.setattr(processes, "START_SECONDS", 0.5)
    with pytest.raises(EnvironmentsError, match=r"importing and making them had not ended after 0\.5 s"):
        _environments("Hanging", environment_args={"here": True})


ODD = {
    "day": date(2026, 1, 2),
    "time": datetime(2026, 1, 2, 3, 4, 5),
    "price": Decimal("1.50"),
    "raw": b"\x00\xff",
    "half": "\ud800",
    "nul": "a\0b",
    "infinite": [float("inf"), None, {"deep": [[]]}],
    "large": "x" * 10**6,
}


def test_a_row_arrives_as_it_is(kept: Environments, tmp_path: Path) -> None:
    row = {"environment": "Attacking", **ODD}
    (talk,) = _hold(kept, [["well"]], tmp_path / "marks", **row, nan=float("nan"))
    with pytest.raises(EnvironmentsError, match=r"row is dict, which JSON cannot hold \(.*date"):
        _ = Seen(talk.environment, None, 30.0).row
    del row["large"]
    (talk,) = _hold(kept, [[call("seen"), "well"]], tmp_path / "marks", **row)
    assert talk.said.messages[1]["content"] == repr({k: v for k, v in ODD.items() if k != "large"})


def test_a_reward_that_reads_what_cannot_be_sent_is_told(kept: Environments, tmp_path: Path) -> None:
    (talk,) = _hold(kept, [["well"]], tmp_path / "marks", environment="Deep")
    seen = Seen(talk.environment, None, 30.0)
    with pytest.raises(EnvironmentsError, match="found is list, which JSON cannot hold"):
        _ = seen.found
    with pytest.raises(EnvironmentsError, match="object is object, which JSON cannot hold"):
        _ = seen.object
    assert seen.half == "\ud800"
    talk.environment.kill()
    with pytest.raises(EnvironmentsError, match=LOST):
        _ = seen.half


def test_a_descriptor_above_1023_is_read(kept: Environments, tmp_path: Path) -> None:
    """A process with many conversations has such, which select(2) does not take."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 4096:
        pytest.skip(f"the hard limit of open files is {hard}")
    environment = kept.take()
    kept.free_all()
    high = fcntl.fcntl(environment.socket, fcntl.F_DUPFD_CLOEXEC, 2000)
    environment.socket.close()
    environment.socket = socket.socket(fileno=high)
    (talk,) = _hold(kept, [[call("child"), "well"]], tmp_path / "marks", environment="Attacking")
    assert talk.environment is environment and talk.said.messages[1]["content"] == "said\n"


@pytest.mark.e2e
def test_five_hundred_environments_at_a_time(marks: Path) -> None:
    environments = _environments(tool_timeout=120.0)
    try:
        talks = _hold(environments, [[call("child"), "well"]] * 512, marks)
        assert {talk.said.messages[1]["content"] for talk in talks} == {"said\n"}
        assert len({talk.environment.pid for talk in talks}) == 512
    finally:
        environments.close()
