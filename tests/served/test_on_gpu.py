"""Train, evaluate, register and read a run on the pretended GPU. As accelerate gives it, it has no index."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_core.system import progress
from tests.held import held
from tests.pretend_gpu import Gpu, needs_cpu_build, pretend_gpu
from tests.served.conftest import accuracy_of, mlflow_run_of, run_pipeline


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Gpu]:
    """Here the stages' processes are modules that run in this process, on the pretended GPU; its record of each."""
    needs_cpu_build()
    found: dict[str, Gpu] = {}

    def run(command: Sequence[str], on_line: Callable[[str], None], env: Mapping[str, str], **_: Any) -> None:
        _, module, *arguments = command
        with pretend_gpu() as found[module], held(os.environ, env), monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [module, *arguments])
            patch.setattr(progress, "_here", None)
            importlib.import_module(module).main()

    monkeypatch.setattr("tasks.processes.launch.run_process", run)
    return found


@pytest.mark.e2e
def test_a_run_on_a_gpu_is_trained_with_checkpoints_evaluated_registered_and_read(
    storage: Path, inputs: Path, on_gpu: dict[str, Gpu]
) -> None:
    from tasks.reports.rollouts import choose_rollouts, with_trained_policy

    keys = ("max_steps=2", "save_steps=1", "eval_steps=2", "per_device_train_batch_size=16", "mixed_precision=bf16")
    run_pipeline(inputs, "name=on-gpu", "registry.model_name=on-gpu", *(f"train.{key}" for key in keys))
    run = storage / "runs" / "on-gpu"
    assert [*on_gpu] == ["grpo_core.train", "grpo_core.evaluate"]
    with pretend_gpu() as on_gpu["coloured"]:
        [read] = with_trained_policy(run, choose_rollouts(run, limit=1)).rows
    for gpu in on_gpu.values():
        assert gpu.waits, "it was used"
        assert not gpu.mismatches + gpu.races + gpu.strays
    assert (run / "training" / "checkpoints" / "step-000001" / "manifest.json").is_file()
    report = json.loads((run / "evaluation" / "report.json").read_text())
    assert mlflow_run_of(run).data.metrics["eval/held-out/trained/accuracy"] == accuracy_of(report)["mean"]
    assert json.loads((run / "registration.json").read_text())["model_uri"] == "models:/on-gpu/1"
    assert len(read["trained_logprobs"]) == len(read["completion_ids"])
