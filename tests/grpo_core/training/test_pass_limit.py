"""The tokens per pass that a training begins with: those of its plan, on whatever GPU it goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import PartialState

from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.planning.hardware import Gpu, named_gpu
from grpo_core.planning.memory import PlannedRun, peak_memory, usable_gib
from grpo_core.planning.plan import Plan, make_plan, plan_inputs
from grpo_core.planning.shapes import PromptLengths
from grpo_core.planning.tokens_per_pass import with_tokens_per_pass
from grpo_core.system.memory import GIB
from grpo_core.training.out_of_memory import first_limit
from tests.conftest import config_values, with_keys
from tests.grpo_core.training.several import in_two_processes
from tests.grpo_core.training.training import are_close, result_of, trained_run
from tests.qwen import QWEN, qwen, with_tokens

LENGTHS = PromptLengths(220, 220, "given")


def _planned(folder: Path, gpu: Gpu | None) -> tuple[RunConfig, Plan]:
    (folder / "config.json").write_text(json.dumps(QWEN["0.5B"]))
    keys = {"mixed_precision": "bf16", "per_device_train_batch_size": 1024, "num_generations": 8}
    config = parse_config(config_values(folder, folder, **keys, max_completion_length=512, engine="transformers"))
    return config, with_tokens_per_pass(config, make_plan(plan_inputs(config, 1000)), LENGTHS, gpu)


def _first_limit(config: RunConfig, plan: Plan, gib: float | None, monkeypatch: Any, is_main: bool = True) -> int:
    """On a GPU on which torch finds that much memory; on a CPU if it is None."""
    properties = SimpleNamespace(name="GPU", total_memory=int((gib or 0) * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device = torch.device("cpu" if gib is None else "cuda")  # without an index, as accelerate gives it
    accelerator: Any = SimpleNamespace(device=device, is_main_process=is_main)
    return first_limit(config, plan, 220, accelerator)


def test_the_plan_s_number_is_kept_on_another_gpu_unless_it_cannot_fit_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torch finds a little less of an H200 than nvidia-smi, whose number the plan was made with."""
    PartialState(cpu=True)
    config, plan = _planned(tmp_path, named_gpu("H200"))
    planned = plan.max_tokens_per_pass
    assert planned is not None
    run = PlannedRun(config, plan, qwen("0.5B"), LENGTHS, named_gpu("H200"))
    peak = peak_memory(run)["peak_memory_gib"]
    for gib in (139.8, 200.0, peak + 0.1, None):  # without any margin, it may run out, or not
        assert _first_limit(config, plan, gib, monkeypatch) == planned
    assert capsys.readouterr().out == ""
    fewer = _first_limit(config, plan, 79.2, monkeypatch)
    smaller = with_tokens(replace(run, gpu=Gpu("GPU", 79.2)), fewer)
    fitting, usable = peak_memory(smaller), usable_gib(smaller.gpu)
    assert usable is not None and 0.98 * usable < fitting["peak_memory_gib"] <= usable
    said = f"{planned} tokens per pass, of the plan, do not fit a GPU of 79.2 GiB: going on with {fewer}"
    assert said in capsys.readouterr().out
    assert _first_limit(config, plan, 79.2, monkeypatch, is_main=False) == fewer
    assert capsys.readouterr().out == ""


def test_a_plan_without_a_number_has_b_sequences_of_the_greatest_length_in_a_pass_or_what_a_gpu_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it was made without the GPU, such as on another machine."""
    PartialState(cpu=True)
    config, plan = _planned(tmp_path, None)
    for gib in (None, 10_000.0):
        assert _first_limit(config, plan, gib, monkeypatch) == 1024 * 732
    assert capsys.readouterr().out == ""
    _, made_there = _planned(tmp_path, Gpu("GPU", 79.2))
    assert _first_limit(config, plan, 79.2, monkeypatch) == made_there.max_tokens_per_pass
    assert f"{1024 * 732} tokens per pass, which the plan did not limit, do not fit a GPU" in capsys.readouterr().out


def test_a_model_whose_memory_is_not_forecast_keeps_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PartialState(cpu=True)
    config, plan = _planned(tmp_path, named_gpu("H200"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert _first_limit(config, plan, 10.0, monkeypatch) == plan.max_tokens_per_pass


def test_processes_on_different_gpus_agree_on_what_fits_the_smallest(tmp_path: Path) -> None:
    config, plan = _planned(tmp_path, named_gpu("H200"))

    def start(rank: int) -> None:
        PartialState(cpu=True)
        with pytest.MonkeyPatch.context() as patches:
            first = _first_limit(config, plan, [139.8, 79.2][rank], patches)
        assert plan.max_tokens_per_pass is not None and 40_000 < first < 0.7 * plan.max_tokens_per_pass
        (tmp_path / f"found-{rank}").write_text(str(first))

    in_two_processes(tmp_path / "processes", start)
    assert (tmp_path / "found-0").read_text() == (tmp_path / "found-1").read_text()


def test_a_number_that_is_configured_holds_on_a_cpu_too_and_changes_rounding_alone(
    values: dict[str, Any], tmp_path: Path
) -> None:
    values = with_keys(values, adam_epsilon=1e-3, temperature=0.9)
    whole, small = (trained_run(tmp_path / name, with_keys(values, **keys)) for name, keys in (
        ("whole", {}), ("small", {"max_tokens_per_pass": 30})
    ))  # fmt: skip
    assert result_of(small)["tokens_per_pass"] == 30 < result_of(whole)["tokens_per_pass"]
    assert not result_of(small)["ran_out_of_memory"]
    assert are_close(whole, small)
