"""What grows with processes and completions, counted: the figures of docs/explanation/thousand-gpus.md."""

from __future__ import annotations

import pickle
import random
import tracemalloc
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from grpo_core import distributed
from grpo_core.config.files import parse_config
from grpo_core.data.order import Schedule
from grpo_core.planning.forecast import communication
from grpo_core.planning.hardware import named_gpu
from grpo_core.planning.memory import PlannedRun, peak_memory, usable_gib
from grpo_core.planning.passes import passes_per_update
from grpo_core.planning.plan import make_plan
from grpo_core.planning.rules import PlanInputs
from grpo_core.planning.shapes import PromptLengths
from grpo_core.planning.tokens_per_pass import choose_tokens
from grpo_core.planning.wall_time import wall_time
from grpo_core.rollout.collect import Sample
from grpo_core.rollout.types import Completion
from tests.conftest import config_values
from tests.grpo_core.training.several import in_processes
from tests.qwen import planned, with_tokens
from tests.serving import free_ports


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_the_first_process_has_three_open_files_per_process_and_the_others_two(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        before = _open_files()
        distributed.start_processes(timedelta(seconds=60))
        distributed.writing_group()
        distributed.wait_for_all()
        found = distributed.gathered([_open_files() - before])
        if rank == 0:
            (tmp_path / f"{len(found)}").write_text(" ".join(map(str, found)))

    for count in (2, 4):
        in_processes(count, tmp_path / f"of-{count}", work, *free_ports(1))
    few, many = ([int(each) for each in (tmp_path / name).read_text().split()] for name in ("2", "4"))
    assert (many[0] - few[0], many[1] - few[1]) == (2 * 3, 2 * 2)


def test_a_sampled_token_takes_13_bytes_on_its_way_and_74_in_each_process() -> None:
    draw, tokens = random.Random(0), 4096
    ids, logprobs = [draw.randrange(150_000) for _ in range(tokens)], [-draw.random() for _ in range(tokens)]
    sent = pickle.dumps([Sample(0, [1], Completion(ids, logprobs, truncated=False), "", [0.0])])
    tracemalloc.start()
    held = pickle.loads(sent)
    bytes_held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(held) == 1
    assert [len(sent) / tokens, bytes_held / tokens] == pytest.approx([13, 74], abs=1)


def test_replacing_groups_takes_the_memory_of_the_prompts_that_are_taken_however_many_there_are() -> None:
    plan = make_plan(PlanInputs(10**9, 8, 64, max_completion_length=16, max_steps=1))
    replaced = [*range(64)]
    tracemalloc.start()
    found = Schedule(plan, 0).fresh(0, {*replaced}, replaced)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len({*found}) == len(found) and not {*found} & {*replaced}
    assert most < 200_000, "bytes"


H100, LENGTHS = named_gpu("H100"), PromptLengths(256, 256, "given")


def _sharded(size: str, processes: int, **keys: Any) -> PlannedRun:
    """A run of a Qwen2.5 of this size, in groups of 8, in machines of 8 H100."""
    values = {"num_processes": processes, "num_machines": processes // 8, "sharding": "full", "num_generations": 8}
    values |= {"mixed_precision": "bf16", "gradient_checkpointing": True, "gradient_accumulation_steps": 1}
    values |= {"engine": "vllm", "vllm_tensor_parallel_size": 8}
    whole = config_values(Path("model"), Path("data"), **(values | keys)) | {"launch": {"launcher": "slurm"}}
    return planned(parse_config(whole), size, LENGTHS, H100)


def test_a_thousand_gpus_talk_for_25_seconds_of_an_update_of_one_to_two_minutes() -> None:
    run = _sharded("32B", 1024, per_device_train_batch_size=8, max_completion_length=4096, max_steps=1)
    run = with_tokens(run, choose_tokens(run))
    between = communication(run, passes_per_update(run.config, run.plan, LENGTHS, 256, 4096))["seconds_per_update"]
    found = wall_time(run.config, run.plan, LENGTHS, None, run.shape, H100, communication=between)
    assert [between, *(3600 * hours for hours in found["interval_hours"])] == pytest.approx([25, 60, 112], abs=0.5)


@pytest.mark.parametrize(("size", "processes", "thousands"), [("7B", 8, 112), ("32B", 64, 49), ("32B", 1024, 56)])
def test_more_gpus_do_not_make_room_for_much_longer_sequences(size: str, processes: int, thousands: int) -> None:
    usable = usable_gib(H100)
    assert usable
    for tokens, fits in ((1000 * thousands, True), (1000 * thousands + 1000, False)):
        run = _sharded(size, processes, per_device_train_batch_size=8, max_completion_length=tokens)
        peak = peak_memory(with_tokens(run, 256 + tokens))["peak_memory_gib"]
        assert (peak <= usable) == fits
