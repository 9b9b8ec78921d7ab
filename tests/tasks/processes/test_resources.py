"""The GPUs that a stage holds are those that its processes and its vLLM servers use, in every stage that starts any."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
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
from tasks.processes.vllm_servers import Place
from tasks.stages.run import Context
from tests.conftest import config_values, with_keys
from tests.nvidia_smi import put_nvidia_smi

pytestmark = pytest.mark.served


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
    """A stage on a machine with 32 GPUs that nobody uses; servers are only placed."""
    put_nvidia_smi(tmp_path, 32)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu_locks, "LOCKS", tmp_path / "locks")
    monkeypatch.setattr(gpu_locks, "used_memory", dict)
    monkeypatch.setattr(slots, "hold_slots", _nothing)
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
        places = list[Place]()

        class Placed:
            problem = ""

            def __init__(self, find: Callable[[], Place], *_: Any):
                self.place = find()
                places.append(self.place)

            def wait_until_up(self, seconds: float) -> None:
                assert seconds

        patch.setattr(vllm_servers, "_Server", Placed)
        patch.setattr(vllm_servers, "_stop", _nothing)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, visible)))
        with pytest.raises(Started) as started:
            stage._work(Context(config, tmp_path, tmp_path))
        mask = started.value.mask
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
