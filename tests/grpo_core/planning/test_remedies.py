"""What `grpo plan` offers where memory is short: changes that are valid, that fit by the same forecast, and no more."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from grpo_core.planning.forecast import forecast, forecast_rows
from grpo_core.planning.hardware import Gpu, named_gpu
from grpo_core.planning.memory import PlannedRun, check_engine_memory, peak_memory, usable_gib
from grpo_core.planning.plan import PlanError
from grpo_core.planning.remedies import PROCESSES, TOGETHER, remedies
from grpo_core.planning.shapes import ModelShape, PromptLengths
from grpo_core.planning.tokens_per_pass import choose_tokens
from tests.conftest import config_values
from tests.qwen import QWEN, planned, qwen, with_tokens

LENGTHS = PromptLengths(256, 256, "given")
KINDS = {
    "sharding": {"train.sharding", "train.num_processes"},
    "recomputing": {"train.gradient_checkpointing"},
    "offload": {"train.offload"},
    "8 bits": {"train.optim"},
    "lora": {"model.use_peft"},
    "together": {"rollout.vllm_tensor_parallel_size"},
    "share": {"rollout.gpu_memory_utilization"},
}


def _values(**keys: Any) -> dict[str, Any]:
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 32, "num_generations": 8}
    sizes |= {"max_completion_length": 512, "mixed_precision": "bf16", "engine": "vllm"}
    return config_values(Path("model"), Path("data"), **(sizes | keys))


def _with(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    values = config.model_dump(exclude_none=True)
    for place, value in changes.items():
        section, key = place.split(".")
        values[section][key] = value
    return parse_config(values)


def _peak(config: RunConfig, shape: ModelShape, gpu: Gpu) -> float:
    """Forecast memory in GiB. Raises ConfigError or PlanError for a run that is refused."""
    run = _fitted(planned(config, shape, LENGTHS, gpu))
    check_engine_memory(run)
    return float(peak_memory(run)["peak_memory_gib"])


def _fitted(run: PlannedRun) -> PlannedRun:
    return with_tokens(run, choose_tokens(run))


@st.composite
def short_of_memory(draw: st.DrawFn) -> PlannedRun:
    """A valid run whose forecast exceeds its GPU."""
    shape, gpu = qwen(draw(st.sampled_from(list(QWEN)))), named_gpu(draw(st.sampled_from(["H100", "L40S", "L4"])))
    processes = draw(st.sampled_from([1, 2, 3, 8, 12]))
    keys = {
        "num_processes": processes,
        "per_device_train_batch_size": draw(st.sampled_from([1, 3, 8])),
        "gradient_accumulation_steps": draw(st.sampled_from([8, 16])),
        "sharding": draw(st.sampled_from(["none", "full", "hybrid"])) if processes > 1 else "none",
        "engine": draw(st.sampled_from(["vllm", "vllm-server", "transformers"])),
        "gradient_checkpointing": draw(st.booleans()),
        "use_peft": draw(st.booleans()),
        "beta": draw(st.sampled_from([0.0, 0.1])),
        "gpu_memory_utilization": draw(st.sampled_from([0.25, 0.6, 0.9])),
        "steps_per_generation": draw(st.sampled_from([None, 8])),
    }
    config = parse_config(_values(**{key: value for key, value in keys.items() if value is not None}))
    run = planned(config, shape, LENGTHS, gpu)
    assume("warning" in peak_memory(_fitted(run)))
    return run


@pytest.mark.slow
@settings(max_examples=settings.default.max_examples // 3)
@given(short_of_memory())
def test_every_remedy_fits_by_the_same_forecast_and_changes_what_it_says(run: PlannedRun) -> None:
    config, shape, gpu = run.config, run.shape, run.gpu
    usable = usable_gib(gpu)
    assert usable
    for remedy in remedies(run):
        changed = _with(config, remedy["changes"])
        assert _peak(changed, shape, gpu) == remedy["peak_memory_gib"] <= usable
        assert changed.train.num_processes == remedy["num_processes"]
        assert all(f"{key} = " in remedy["change"] for key in remedy["changes"])
        same = planned(changed, shape, LENGTHS, gpu).plan.effective_batch_size == run.plan.effective_batch_size
        assert ("the same batch of" in remedy["change"]) == same
        same_rows = "train.per_device_train_batch_size" not in remedy["changes"]
        for smaller in PROCESSES if same and same_rows else ():
            if config.train.num_processes <= smaller < remedy["num_processes"]:
                steps = changed.train.gradient_accumulation_steps * remedy["num_processes"] // smaller
                fewer = {"train.num_processes": smaller, "train.gradient_accumulation_steps": steps}
                with pytest.raises((AssertionError, ConfigError, PlanError)):
                    assert _peak(_with(config, remedy["changes"] | fewer), shape, gpu) <= usable
        others = [kind for kind in KINDS.values() if kind & remedy["changes"].keys()]
        for kind in others if len(others) > 1 else []:
            rest = {key: value for key, value in remedy["changes"].items() if key not in kind}
            if not kind & KINDS["sharding"]:  # without it, there are not more processes
                with pytest.raises((AssertionError, ConfigError, PlanError)):
                    assert _peak(_with(config, rest), shape, gpu) <= usable


def _found(size: str, **keys: Any) -> list[dict[str, Any]]:
    return remedies(planned(parse_config(_values(**keys)), size, LENGTHS, named_gpu("H100")))


def test_a_model_larger_than_its_gpu_is_offered_what_fits() -> None:
    """Passes have as many tokens as the rest holds, so that fewer processes suffice where less else is held."""
    found = _found("7B")
    assert [remedy["changes"] for remedy in found] == [
        _sharded(4, 8),
        {"model.use_peft": True},
        _sharded(2, 16) | {"train.offload": "optimizer"},
        _sharded(2, 16) | {"train.optim": "adamw_8bit"},
        _sharded(2, 16) | {"rollout.vllm_tensor_parallel_size": 2},
        {"train.gradient_checkpointing": True, "train.offload": "optimizer"},
    ]
    assert all("the same batch of 256" in remedy["change"] for remedy in found)


def _sharded(processes: int, steps: int) -> dict[str, Any]:
    changes = {"train.num_processes": processes, "train.gradient_accumulation_steps": steps}
    return {"train.sharding": "full"} | changes


def test_sharding_over_the_present_processes_comes_before_more_of_them() -> None:
    first = _found("7B", num_processes=8, gradient_accumulation_steps=4, gradient_checkpointing=True)[0]
    assert first["changes"] == {"train.sharding": "full"}
    assert first["change"] == "train.sharding = 'full' (8 GPUs, the same batch of 256)"


def test_kinds_go_together_where_no_single_one_is_enough() -> None:
    """vLLM's weights of a 32B model alone are 61 GiB: processes have to sample together, whatever else is done."""
    found = _found("32B", num_processes=8, gradient_accumulation_steps=4, gpu_memory_utilization=0.8)
    assert found
    assert all(len(remedy["changes"]) > 1 for remedy in found)
    assert any(remedy["num_processes"] == 8 and "model.use_peft" in remedy["changes"] for remedy in found)


def _forecast(folder: Path, size: str, gpu: str, **keys: Any) -> dict[str, dict[str, Any]]:
    (folder / "config.json").write_text(json.dumps(QWEN[size]))
    config = parse_config(_values(name_or_path=str(folder), **keys))
    run = planned(config, size, LENGTHS, named_gpu(gpu))
    return forecast(config, run.plan, LENGTHS, "not measured", [], run.gpu)


def test_a_plan_shows_what_would_fit_or_that_nothing_does_and_nothing_where_all_is_well(tmp_path: Path) -> None:
    fits = _forecast(tmp_path, "0.5B", "H100")
    assert "remedies" not in fits["memory"]
    assert "  would fit" not in [what for what, _, _ in forecast_rows(fits)]
    short = _forecast(tmp_path, "7B", "H100")
    rows = [(value, how) for what, value, how in forecast_rows(short) if what == "  would fit"]
    assert [how for _, how in rows] == [remedy["change"] for remedy in short["memory"]["remedies"]]
    assert [value for value, _ in rows] == [f"{it['peak_memory_gib']:.1f} GiB" for it in short["memory"]["remedies"]]
    json.dumps(short)
    never = _forecast(tmp_path, "72B", "T4", engine="transformers", per_device_train_batch_size=8)
    [(value, how)] = [(value, how) for what, value, how in forecast_rows(never) if what == "  would fit"]
    assert value == "nothing"
    assert "sharding over up to 64 processes" in how


def test_a_share_that_is_refused_comes_with_what_would_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must hold its weights \(61\.0 GiB\)") as refused:
        _forecast(tmp_path, "32B", "H100", num_processes=8, gradient_accumulation_steps=4)
    _, *offered = str(refused.value).splitlines()
    assert offered
    assert all(line.startswith("would fit, with ") and "vllm_tensor_parallel_size = " in line for line in offered)


@pytest.mark.parametrize(("engine", "offered"), [("vllm", True), ("vllm-server", False), ("transformers", False)])
def test_only_vllm_in_the_training_process_can_give_memory_back(engine: str, offered: bool) -> None:
    changes = [_found("14B", engine=engine, **keys) for keys in ({}, {"gpu_memory_utilization": 0.9})]
    keys = {key for remedy in itertools.chain(*changes) for key in remedy["changes"]}
    assert bool(keys & (KINDS["together"] | KINDS["share"])) == offered
    assert TOGETHER == (2, 4, 8)
