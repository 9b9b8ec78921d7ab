"""Slots that a stage takes: one per GPU that it uses, on whichever machine, or one where there is no GPU."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.exceptions import ObjectNotFound

from grpo_core.config.files import parse_config
from tasks.processes import slots
from tasks.stages.errors import StageError
from tests.conftest import config_values, with_keys

SHARDED = {"num_processes": 4, "sharding": "full"}
REPLICATED = {"num_processes": 4}
SERVERS = {"engine": "vllm-server", "vllm_num_servers": 2, "vllm_tensor_parallel_size": 2}
HOSTS = {"launcher": "ssh", "hosts": ["alpha", "beta"]}


@pytest.mark.parametrize(
    ("keys", "evaluated", "visible", "wanted", "here"),
    [
        ({}, False, 8, 1, 1),
        ({}, False, 0, 1, 1),
        (SHARDED, False, 8, 4, 4),
        (SHARDED, False, 0, 1, 4),
        (SHARDED, True, 8, 4, 4),
        (REPLICATED, True, 8, 1, 1),
        (SERVERS | REPLICATED, False, 8, 8, 8),
        (SERVERS | REPLICATED, True, 8, 5, 5),
        (
            SERVERS | {"vllm_weight_transfer": "ipc", "vllm_num_servers": 1, "vllm_tensor_parallel_size": 1},
            False,
            8,
            1,
            1,
        ),
        (SERVERS | {"vllm_server_base_urls": ["http://127.0.0.1:1"]}, False, 8, 1, 1),
        (SHARDED | {"num_machines": 2}, False, 8, 4, 0),
        (SHARDED | {"num_machines": 2}, False, 0, 1, 0),
        (REPLICATED | {"num_machines": 2}, True, 8, 1, 0),
    ],
)
def test_a_stage_takes_a_slot_per_gpu_and_the_gpus_of_its_own_machine(
    keys: dict[str, Any],
    evaluated: bool,
    visible: int,
    wanted: int,
    here: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []

    @contextmanager
    def take(count: int, *_: Any) -> Iterator[None]:
        taken.append(count)
        yield

    monkeypatch.setattr(slots, "visible_devices", lambda: ["0"] * visible)
    monkeypatch.setattr(slots, "problem_of_driver", str)
    monkeypatch.setattr(slots, "hold_slots", take)
    monkeypatch.setattr(slots, "own_gpus", take)
    monkeypatch.setattr(slots, "get_run_logger", logging.getLogger)
    values = with_keys(config_values(tmp_path, tmp_path), **keys)
    config = parse_config(values | ({"launch": HOSTS} if "num_machines" in keys else {}))
    with slots.hold_gpus(config.where_evaluated if evaluated else config):
        assert taken == [wanted, here]


class Server:
    """Stands for Prefect's: one limit, or none."""

    def __init__(self, limit: int | None, taken: int, active: bool, turn: int):
        self.limit = limit and SimpleNamespace(limit=limit, active_slots=taken, active=active)
        self.turn = SimpleNamespace(limit=1, active_slots=turn, active=True)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def read_global_concurrency_limit_by_name(self, name: str) -> Any:
        if self.limit is None:
            raise ObjectNotFound(Exception())
        return self.turn if name == slots.TURN else self.limit


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What Prefect was asked for."""
    found: list[dict[str, Any]] = []

    @contextmanager
    def concurrency(name: str, **options: Any) -> Iterator[None]:
        found.append({"name": name, **options})
        yield

    monkeypatch.setattr(slots, "concurrency", concurrency)
    monkeypatch.setattr(slots, "get_run_logger", logging.getLogger)
    return found


def _server(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, taken: int = 0, active: bool = True, turn: int = 0
) -> None:
    monkeypatch.setattr(slots, "get_client", lambda sync_client: Server(limit, taken, active, turn))


def test_a_stage_that_has_to_wait_says_for_how_many_slots(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked: list[dict[str, Any]]
) -> None:
    caplog.set_level(logging.INFO)
    _server(monkeypatch, 8, 4)
    with slots.hold_slots(4):
        assert not caplog.messages
    with slots.hold_slots(8):
        pass
    expected = "waiting for 8 slots of the concurrency limit grpo-training: 4 of 8 are taken, 4 are free"
    assert caplog.messages == [expected]
    assert [(it["name"], it["occupy"], it["lease_duration"]) for it in asked] == [
        ("grpo-training-turn", 1, 60.0),
        ("grpo-training", 4, 60.0),
        ("grpo-training-turn", 1, 60.0),
        ("grpo-training", 8, 60.0),
    ]


class Limits:
    """Limits in this process. As at Prefect's server, whichever asks first when there are enough slots gets them."""

    def __init__(self, **limits: int):
        self.free, self.changed = (
            {name.replace("_", "-"): limit for name, limit in limits.items()},
            threading.Condition(),
        )
        self.waiting: list[tuple[str, int]] = []

    @contextmanager
    def concurrency(self, name: str, occupy: int, **_: Any) -> Iterator[None]:
        with self.changed:
            self.waiting.append((name, occupy))
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.free[name] >= occupy)
            self.waiting.remove((name, occupy))
            self.free[name] -= occupy
        try:
            yield
        finally:
            with self.changed:
                self.free[name] += occupy
                self.changed.notify_all()

    def until_waiting(self, name: str, occupy: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: (name, occupy) in self.waiting, 60)


def test_a_stage_that_wants_many_slots_is_not_overtaken_by_those_that_want_few(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, begun = Limits(grpo_training=3, grpo_training_turn=1), list[int]()
    monkeypatch.setattr(slots, "concurrency", limits.concurrency)
    _server(monkeypatch, None)

    def stage(count: int) -> None:
        with slots.hold_slots(count):
            begun.append(count)

    with slots.hold_slots(1):
        stages = [threading.Thread(target=stage, args=(count,), daemon=True) for count in (3, 2)]
        stages[0].start()
        limits.until_waiting("grpo-training", 3)
        stages[1].start()
        limits.until_waiting("grpo-training-turn", 1)  # though two slots are free
        assert not begun
    for each in stages:
        each.join(60)
    assert begun == [3, 2]


def test_a_stage_that_waits_for_its_turn_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked: list[dict[str, Any]]
) -> None:
    caplog.set_level(logging.INFO)
    _server(monkeypatch, 8, 4, turn=1)
    with slots.hold_slots(2):
        assert caplog.messages == ["waiting for the turn: another stage takes slots of grpo-training first"]


def test_a_stage_that_can_never_have_its_slots_is_refused_with_the_command_that_helps(
    monkeypatch: pytest.MonkeyPatch, asked: list[dict[str, Any]]
) -> None:
    _server(monkeypatch, 1)
    with pytest.raises(StageError, match=r"takes 4 slots, .* grpo-training has 1: .* --limit 4`"), slots.hold_slots(4):
        pass
    assert not asked


@pytest.mark.parametrize(("limit", "active"), [(None, True), (1, False)])
def test_a_limit_that_is_missing_or_switched_off_holds_up_nothing(
    limit: int | None, active: bool, monkeypatch: pytest.MonkeyPatch, asked: list[dict[str, Any]]
) -> None:
    _server(monkeypatch, limit, active=active)
    with slots.hold_slots(4):
        assert asked[1]["occupy"] == 4
