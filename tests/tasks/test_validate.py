"""What validate says of a promotion that is to follow, and on which GPU it tries rewards."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_core.config.files import parse_config
from grpo_core.planning.nvidia import list_devices
from tasks import validate
from tasks.processes.gpus import locks as gpu_locks
from tasks.stages.run import Context
from tasks.validate import deciding_metric_of, too_few_to_promote
from tests.conftest import config_values, write_sums
from tests.nvidia_smi import put_nvidia_smi
from tests.rows import screen

GRADES = {"function": "char_length"}  # without a lowest value
RIGHT = {"function": "numeric_match"}


@pytest.mark.parametrize(
    ("rewards", "zero_or_one", "num_prompts", "promotion", "warns"),
    [
        ([GRADES], [], 199, {}, True),
        ([GRADES], [], 200, {}, False),
        ([{**GRADES, "clip": [-50, 0]}], [], 10, {}, False),
        ([{"function": "my_rewards:f"}], ["f"], 10, {}, False),
        ([{"function": "my_rewards:f"}], [], 10, {}, True),
        ([{"function": "my_rewards:f", "range": [-9, 0]}], [], 10, {}, False),
        ([RIGHT, GRADES], ["numeric_match"], 10, {}, False),
        ([RIGHT, GRADES], ["numeric_match"], 10, {"metric": "reward"}, True),
        ([GRADES], [], 10, {"metric": "accuracy"}, False),
        ([GRADES], [], 10, {"set": "other"}, False),
    ],
)
def test_held_out_prompts_that_cannot_promote_a_grade_without_range_are_named_before_the_training(
    tmp_path: Path,
    rewards: list[dict[str, Any]],
    zero_or_one: list[str],
    num_prompts: int,
    promotion: dict[str, Any],
    warns: bool,
) -> None:
    sets = {"sets": [{"name": "other", "data": "other.parquet"}]}
    values = {**config_values(tmp_path, tmp_path), "rewards": rewards, "promotion": promotion, "evaluation": sets}
    config = parse_config(values)
    metric = deciding_metric_of(config, zero_or_one)
    warnings = too_few_to_promote(config, metric, {"held-out": num_prompts, "other": 300})
    assert bool(warnings) == warns
    if warns:
        name = rewards[-1]["function"].rpartition(":")[2]
        assert f"the range of '{name}' is unknown: with {num_prompts} prompts in 'held-out'" in warnings[0]


@pytest.mark.slow
def test_rewards_are_tried_on_a_gpu_that_is_free_or_on_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def try_rewards(command: list[str], *_: Any, **__: Any) -> None:
        seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        Path(command[-1]).write_text("{}")

    said: list[str] = []
    monkeypatch.setattr(validate, "run_process", try_rewards)
    log = SimpleNamespace(info=said.append, warning=lambda text, *words: said.append(text % words))
    monkeypatch.setattr(validate, "get_run_logger", lambda: log)
    monkeypatch.setattr(gpu_locks, "LOCKS", tmp_path / "locks")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    context = Context(parse_config(config_values(tmp_path, tmp_path)), tmp_path, tmp_path)
    validate._rehearse(context)
    list_devices.cache_clear()
    put_nvidia_smi(tmp_path, 1)
    validate._rehearse(context)
    assert (seen, said) == ([None, "0"], [])
    held = gpu_locks.take_gpus(1, said.append)
    validate._rehearse(context)
    os.close(held["0"])
    assert seen[2:] == [""]
    assert said == [
        "rewards and environments are tried without a GPU, since none is free: 1 of 1 GPUs are locked by stages (in "
        f"{gpu_locks.LOCKS})"
    ]


@pytest.mark.slow
def test_prompts_that_choose_the_model_may_not_judge_it_from_another_file(model_folder: Path, tmp_path: Path) -> None:
    for name, first, last in [("train", 10, 40), ("eval", 60, 70), ("final", 68, 80)]:
        write_sums(tmp_path / f"{name}.parquet", first, last)
    values = config_values(model_folder, tmp_path, load_best_model_at_end=True, eval_steps=1, save_steps=1)
    values["evaluation"]["sets"][0]["data"] = str(tmp_path / "final.parquet")
    assert screen(parse_config(values)).shape == [
        "2 prompts of eval-final are in eval too: the training chooses its model by them, so they cannot also decide "
        "on its promotion ('final'); leave them out of one of the two"
    ]
    write_sums(tmp_path / "final.parquet", 70, 80)
    assert not screen(parse_config(values)).refused
