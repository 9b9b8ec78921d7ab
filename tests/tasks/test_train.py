"""A training is used only when it did what the plan says, with finite figures, though its process exited 0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.config.training import TrainConfig
from grpo_core.planning.plan import Plan, make_plan
from grpo_core.planning.rules import PlanInputs
from tasks.processes.launcher import launcher, process_environment
from tasks.stages.errors import StageError
from tasks.train import check_result
from tests.conftest import config_values


@pytest.fixture
def plan() -> Plan:
    return make_plan(PlanInputs(8, 4, 8, max_completion_length=4, max_steps=3))


def _metrics(path: Path, steps: list[int], **figures: float) -> Path:
    path.write_text("".join(json.dumps({"step": step, "loss": 0.1, "reward": 0.5, **figures}) + "\n" for step in steps))
    return path


COUNTED = {"updates": 3, "rollouts": 3, "prompts_seen": 6, "prompts_dropped": 0, "completions": 24}


def _result(stopped_early_at_step: int | None = None, **counted: int) -> dict[str, Any]:
    return {
        "counted": {**COUNTED, **counted},
        "stopped_early_at_step": stopped_early_at_step,
        "steps_without_metrics": [],
    }


def test_a_training_that_followed_its_plan_is_accepted(plan: Plan, tmp_path: Path) -> None:
    check_result(_result(), _metrics(tmp_path / "m.jsonl", [1, 2, 3]), plan)


def test_a_training_that_stopped_early_is_held_against_the_plan_up_to_there(plan: Plan, tmp_path: Path) -> None:
    counted = {"updates": 2, "rollouts": 2, "prompts_seen": 4, "completions": 16}
    check_result(_result(2, **counted), _metrics(tmp_path / "m.jsonl", [1, 2]), plan)
    with pytest.raises(StageError, match="the plan says"):
        check_result(_result(None, **counted), _metrics(tmp_path / "m.jsonl", [1, 2]), plan)
    with pytest.raises(StageError, match="each of the 2 steps once"):
        check_result(_result(2, **counted), _metrics(tmp_path / "m.jsonl", [1, 2, 3]), plan)


@pytest.mark.parametrize(
    ("name", "value"),
    [("updates", 2), ("updates", 4), ("rollouts", 4), ("prompts_seen", 5), ("prompts_dropped", 1), ("completions", 32)],
)
def test_a_count_that_is_not_the_planned_one_is_refused(plan: Plan, tmp_path: Path, name: str, value: int) -> None:
    with pytest.raises(StageError, match=f"plan says .*'{name}': {COUNTED[name]}.* counted .*'{name}': {value}"):
        check_result(_result(**{name: value}), _metrics(tmp_path / "m.jsonl", [1, 2, 3]), plan)


@pytest.mark.parametrize("steps", [[1, 2], [1, 2, 2, 3], [1, 3]])
def test_missing_or_repeated_steps_are_refused(plan: Plan, tmp_path: Path, steps: list[int]) -> None:
    with pytest.raises(StageError, match="each of the 3 steps once"):
        check_result(_result(), _metrics(tmp_path / "m.jsonl", steps), plan)


@pytest.mark.parametrize(("name", "value"), [("loss", float("nan")), ("reward", float("inf"))])
def test_a_figure_that_is_not_finite_is_refused_by_name(plan: Plan, tmp_path: Path, name: str, value: float) -> None:
    with pytest.raises(StageError, match=f"step 1: {name} is"):
        check_result(_result(), _metrics(tmp_path / "m.jsonl", [1, 2, 3], **{name: value}), plan)


def _config(**keys: Any) -> RunConfig:
    return parse_config(config_values(Path("model"), Path("data"), **keys))


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that sets up neither threads nor torch's allocator."""
    for name in ("OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("bare")
def test_one_process_is_started_without_a_launcher_with_the_environment_that_it_would_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = _config()
    assert launcher(config.train) == []
    expected = {"ACCELERATE_MIXED_PRECISION": "no", "OMP_NUM_THREADS": str(os.cpu_count())}
    assert expected.items() <= process_environment(config).items()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert process_environment(config)["OMP_NUM_THREADS"] == "3"


def test_several_processes_are_started_by_accelerate() -> None:
    command = launcher(TrainConfig(num_processes=2))
    assert "accelerate.commands.launch" in command
    assert command[command.index("--num_processes") + 1] == "2"
    assert command[command.index("--mixed_precision") + 1] == "no"  # the policy has its own copy in bfloat16


@pytest.mark.usefixtures("bare")
def test_the_allocator_s_segments_grow_unless_the_user_or_ipc_say_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "PYTORCH_CUDA_ALLOC_CONF"
    assert process_environment(_config())[name] == "expandable_segments:True"
    assert name not in process_environment(_config(engine="vllm-server", vllm_weight_transfer="ipc"))
    for own in (name, "PYTORCH_ALLOC_CONF"):
        with monkeypatch.context() as patch:
            patch.setenv(own, "max_split_size_mb:512")
            assert name not in process_environment(_config(offload="optimizer"))


@pytest.mark.usefixtures("bare")
def test_page_locked_memory_of_what_is_offloaded_is_not_rounded_up() -> None:
    setting = process_environment(_config(offload="optimizer"))["PYTORCH_CUDA_ALLOC_CONF"]
    assert setting == "expandable_segments:True,pinned_max_round_threshold_mb:1"
    with pytest.raises(Exception, match="stoull"):  # torch knows the name: it reads the number behind it
        torch._C._accelerator_setAllocatorSettings(setting.replace(":1", ":none"))


HOSTILE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_machines: 4
num_processes: 32
machine_rank: 3
main_process_ip: 10.0.0.1
gpu_ids: '0'
debug: true
enable_cpu_affinity: true
mixed_precision: fp16
dynamo_config: {dynamo_backend: INDUCTOR}
fsdp_config: {fsdp_version: 2, fsdp_offload_params: true}
"""
SHOWN = """
import json, os, sys
from pathlib import Path
names = [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "RANK", "WORLD_SIZE", "OMP_NUM"))]
Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps({name: os.environ[name] for name in sorted(names)}))
"""


@pytest.mark.slow
def test_the_user_s_accelerate_configuration_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text(HOSTILE)
    (tmp_path / "show.py").write_text(SHOWN)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    train = TrainConfig(num_processes=2)
    done = subprocess.run(
        [sys.executable, *launcher(train), str(tmp_path / "show.py"), str(tmp_path)],
        env={**os.environ, "HF_HOME": str(tmp_path), "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "were not passed" not in done.stderr, "nothing is left to the launcher's defaults"
    for rank in "01":
        found = json.loads((tmp_path / rank).read_text())
        assert (found["RANK"], found["WORLD_SIZE"], found["OMP_NUM_THREADS"]) == (rank, "2", "1")
        assert found["ACCELERATE_MIXED_PRECISION"] == "no"
        assert found.get("ACCELERATE_DYNAMO_BACKEND", "NO") == "NO"
        on = {name for name, value in found.items() if value.lower() == "true"}
        assert on == {"ACCELERATE_USE_CPU"}
        assert not [name for name in found if "FSDP" in name]
