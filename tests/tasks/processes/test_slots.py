"""Slots that a stage takes: one per GPU that it uses, on whichever machine, or one where there is no GPU; in which
order; and that the GPUs that it holds are those that its processes and its vLLM servers use."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from grpo_core.rollout.vllm.serve import own_gpus
from tasks import evaluate, probe, train
from tasks.processes import vllm_servers
from tasks.processes.gpus import locks as gpu_locks
from tasks.processes.gpus import slots
from tasks.processes.gpus.line import Place
from tasks.stages.errors import StageError
from tasks.stages.run import Context
from tests.conftest import config_values, with_keys
from tests.nvidia_smi import put_nvidia_smi
from tests.processes import wait_for

SHARDED = {"num_processes": 4, "sharding": "full"}
REPLICATED = {"num_processes": 4}
SERVERS = {"engine": "vllm-server", "vllm_num_servers": 2, "vllm_tensor_parallel_size": 2}
HOSTS = {"launcher": "ssh", "hosts": ["alpha", "beta"]}


@pytest.mark.parametrize(
    ("keys", "evaluated", "visible", "wanted", "here"),
    [
        ({}, False, 0, 1, 1),
        (SHARDED, False, 0, 1, 4),
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
    with slots.hold_gpus(config.where_evaluated if evaluated else config, is_training=not evaluated):
        assert taken == [wanted, here]


class Limit:
    """Stands for Prefect's limit. As there, whichever asks first when there are enough slots gets them."""

    def __init__(self, limit: int, active: bool = True):
        self.limit, self.active, self.active_slots = limit, active, 0
        self.lock, self.asked = threading.Lock(), list[dict[str, Any]]()

    @contextmanager
    def concurrency(self, name: str, occupy: int, **options: Any) -> Iterator[None]:
        with self.lock:
            self.asked.append({"name": name, "occupy": occupy, **options})
            if self.active_slots + occupy > self.limit:
                raise TimeoutError
            self.active_slots += occupy
        try:
            yield
        finally:
            with self.lock:
                self.active_slots -= occupy


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Limit | None], None]:
    """Replaces Prefect's server by one with this limit."""
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    monkeypatch.setattr(slots, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(slots, "_kept", [])
    monkeypatch.setattr(slots, "get_run_logger", logging.getLogger)

    def serve(limit: Limit | None) -> None:
        monkeypatch.setattr(slots, "_read_limit", lambda: limit)
        monkeypatch.setattr(slots, "concurrency", limit and limit.concurrency)

    return serve


Serve = Callable[[Limit | None], None]


def test_stages_that_wait_go_in_order_and_a_run_evaluates_what_it_trained_before_another_training(
    served: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    served(Limit(1))
    due = {"first": 0.0, "early": 10.0, "late": 20.0, "urgent": 30.0, "trained": 40.0}
    monkeypatch.setattr(slots, "_arrival", lambda: due.get(threading.current_thread().name, 0.0))
    begun = list[str]()

    def run() -> None:
        name = threading.current_thread().name
        if name != "trained":
            with slots.hold_slots(1, name, is_training=True, priority=5 if name == "urgent" else 0):
                begun.append(name)
        with slots.hold_slots(1, name, is_training=False, priority=0):
            begun.append(f"{name}, evaluated")

    threads = [threading.Thread(target=run, name=name, daemon=True) for name in ("trained", "urgent", "late", "early")]
    with slots.hold_slots(1, "first", is_training=True, priority=0):
        for number, thread in enumerate(threads, start=1):
            thread.start()
            wait_for(lambda number=number: _waiting(caplog) == number)
        Place("dead").file.close()  # its process was killed
    with slots.hold_slots(1, "first", is_training=False, priority=0):
        begun.append("first, evaluated")
    for thread in threads:
        thread.join(60)
    order = ["urgent", "urgent, evaluated", "early", "early, evaluated", "late", "late, evaluated"]
    assert begun == ["first, evaluated", "trained, evaluated", *order]
    assert caplog.messages[2] == (
        "waiting for 1 slot of the concurrency limit grpo-training: 1 of 1 taken (by first); number 3 in line, after "
        "trained, urgent"
    )


def _waiting(caplog: pytest.LogCaptureFixture) -> int:
    """How many threads have said that they wait; each says it again when its number changes."""
    return len({record.threadName for record in caplog.records if "number" in record.getMessage()})


def test_a_stage_that_wants_many_slots_is_not_overtaken_by_those_that_want_few(
    served: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    served(Limit(3))
    begun = list[int]()

    def stage(count: int) -> None:
        with slots.hold_slots(count, f"takes-{count}", is_training=False, priority=0):
            begun.append(count)

    threads = [threading.Thread(target=stage, args=(count,), daemon=True) for count in (3, 2)]
    with slots.hold_slots(1, "first", is_training=False, priority=0):
        for number, thread in enumerate(threads, start=1):
            thread.start()
            wait_for(lambda number=number: _waiting(caplog) == number)  # though two slots are free
        assert not begun
    for thread in threads:
        thread.join(60)
    assert begun == [3, 2]


def test_a_stage_whose_slots_another_storage_s_stage_takes_first_waits_on(
    served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, taken = Limit(1), iter([True, False])

    @contextmanager
    def taken_at_first(name: str, **options: Any) -> Iterator[None]:
        if next(taken):
            raise TimeoutError
        with limit.concurrency(name, **options):
            yield

    served(limit)
    monkeypatch.setattr(slots, "concurrency", taken_at_first)
    with slots.hold_slots(1, "run", is_training=False, priority=0):
        assert limit.active_slots == 1
    assert limit.asked[0]["lease_duration"] == 60.0


def test_a_stage_that_can_never_have_its_slots_is_refused_with_the_command_that_helps(served: Serve) -> None:
    served(Limit(1))
    expected = r"takes 4 slots, .* grpo-training has 1: .* --limit 4`"
    with pytest.raises(StageError, match=expected), slots.hold_slots(4, "run", is_training=True, priority=0):
        pass


@pytest.mark.parametrize("change", [{"limit": 1}, {"active": False}])
def test_a_limit_that_is_lowered_or_switched_off_leaves_no_stage_at_the_head_of_the_line_forever(
    change: dict[str, Any], served: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    served(limit := Limit(2))
    ended = list[str]()

    def wait() -> None:
        try:
            with slots.hold_slots(2, "waits", is_training=True, priority=0):
                ended.append("held")
        except StageError as error:
            ended.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    with slots.hold_slots(1, "first", is_training=True, priority=0):
        thread.start()
        wait_for(lambda: _waiting(caplog) == 1)
        vars(limit).update(change)
        thread.join(10)
    assert ended == ["held"] if "active" in change else "--limit 2`" in ended[0]
    assert len([*(tmp_path / "line").glob("*.waits")]) == (2 if "active" in change else 1)  # places of ended trainings


@pytest.mark.parametrize("limit", [None, Limit(1, active=False)])
def test_a_limit_that_is_missing_or_switched_off_holds_up_nothing(limit: Limit | None, served: Serve) -> None:
    served(limit)
    with slots.hold_slots(4, "run", is_training=True, priority=0):
        assert limit is None or not limit.asked


class Started(Exception):
    """Raised in place of starting a stage's processes: the configuration that says how many they are."""

    def __init__(self, config: RunConfig):
        self.config, self.mask = config, os.environ["CUDA_VISIBLE_DEVICES"].split(",")


def _start(first: Any, *_: Any) -> None:
    raise Started(first.config if isinstance(first, Context) else first)


def _nothing(*_: Any) -> Any:
    return nullcontext([])


# What each stage does besides taking GPUs and starting servers and processes.
BESIDES: dict[ModuleType, dict[str, Any]] = {
    probe: {"launch_with_restarts": _start},
    evaluate: {
        "launch_with_restarts": _start,
        "connect": _nothing,
        "answering": _nothing,
        "present_champion": lambda *_: None,
        "hash_values": _nothing,
        "Parts": lambda *_: SimpleNamespace(base_answers=()),
        "_answers_of_another_arm": lambda *_: (None, []),
    },
    train: {
        "run_training": _start,
        "load_plan": lambda *_: SimpleNamespace(max_steps=1),
        "open_tracking_run": lambda *_: {},
        "run_address": lambda *_: "",
        "sending": _nothing,
        "tracing": _nothing,
        "_logging_cost": _nothing,
        "_showing_progress": _nothing,
        "Race": _nothing,
    },
}


@pytest.fixture(params=[train, evaluate, probe], ids=lambda stage: stage.__name__)
def stage(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A stage on a machine with 32 free GPUs; servers are only placed."""
    put_nvidia_smi(tmp_path, 32)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu_locks, "LOCKS", tmp_path / "locks")
    monkeypatch.setattr(gpu_locks, "used_memory", dict)
    for module in (slots, request.param):
        monkeypatch.setattr(module, "get_run_logger", logging.getLogger)
    for name, found in BESIDES[request.param].items():
        monkeypatch.setattr(request.param, name, found)
    yield request.param


KEYS = {
    "num_processes": st.integers(1, 5),
    "sharding": st.sampled_from(["none", "full"]),
    "vllm_num_servers": st.integers(1, 3),
    "vllm_tensor_parallel_size": st.integers(1, 3),
    "vllm_data_parallel_size": st.integers(1, 2),
    "vllm_weight_transfer": st.sampled_from(["auto", "nccl", "ipc"]),
}


@pytest.mark.served
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm, which is not installed")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the machine stays the same
@given(keys=st.fixed_dictionaries(KEYS), visible=st.none() | st.permutations([*range(32)]))
def test_each_process_and_each_server_has_gpus_of_its_own_and_none_is_held_in_vain(
    stage: ModuleType, tmp_path: Path, keys: Mapping[str, Any], visible: list[int] | None
) -> None:
    values = with_keys(config_values(tmp_path, tmp_path), engine="vllm-server", **keys)
    if keys["vllm_weight_transfer"] == "ipc":
        values = with_keys(values, vllm_num_servers=1, vllm_tensor_parallel_size=1, vllm_data_parallel_size=1)
    try:
        config = parse_config(values)
    except ConfigError:
        assume(False)
    with pytest.MonkeyPatch.context() as patch:
        places = list[vllm_servers.Place]()

        class Placed:
            problem = ""

            def __init__(self, find: Callable[[], vllm_servers.Place], *_: Any):
                self.place = find()
                places.append(self.place)

            def wait_until_up(self, seconds: float) -> None:
                assert seconds

        taken = list[int]()
        patch.setattr(slots, "hold_slots", lambda count, *_: taken.append(count) or nullcontext())
        patch.setattr(vllm_servers, "_Server", Placed)
        patch.setattr(vllm_servers, "_stop", _nothing)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, visible)))
        with pytest.raises(Started) as started:
            stage._work(Context(config, tmp_path, tmp_path))
        mask = started.value.mask
        assert taken == [len(mask)]
        assert [int(name) for name in mask] == (visible or [*range(32)])[: len(mask)]
        patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(mask))
        patch.setattr(torch.cuda, "device_count", lambda: len(mask))
        firsts = [int(place.command[place.command.index("--first-gpu") + 1]) for place in places]
        of_servers = [own_gpus(config, first)["CUDA_VISIBLE_DEVICES"].split(",") for first in firsts]
    rollout = config.rollout
    assert len(of_servers) == rollout.vllm_num_servers
    each = rollout.vllm_tensor_parallel_size * rollout.vllm_data_parallel_size
    assert all(len(gpus) == each for gpus in of_servers)
    of_processes = mask[: started.value.config.train.num_processes]
    assert len(of_processes) == (1 if stage is evaluate and config.train.sharding == "none" else keys["num_processes"])
    if rollout.vllm_weight_transfer == "ipc":
        assert of_servers == [mask[:1]], "the training's own"
        assert mask == of_processes
    else:
        assert sorted(mask) == sorted([*of_processes, *chain(*of_servers)])
