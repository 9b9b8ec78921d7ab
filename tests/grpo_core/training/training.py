"""A training in this process, and what it leaves in its run directory."""

from __future__ import annotations

import json
import random
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from grpo_core.config.files import load_config
from grpo_core.data.demonstrations import SCHEMA
from grpo_core.planning.warm_start import plan_warm_start
from grpo_core.training import checkpoint, checkpoint_write
from grpo_core.training.loop import train
from tests.conftest import make_run, with_keys


def trained_run(folder: Path, values: dict[str, Any], **keys: Any) -> Path:
    run = make_run(folder, with_keys(values, **keys))
    train(run, run / "training")
    return run


def demonstrate(run: Path, draw: random.Random, number: int = 22, output: str = "warm-start") -> list[dict[str, Any]]:
    """Put drawn demonstrations and the plan of the warm start where the stages do; returns the demonstrations."""
    rows = []
    for _ in range(number):
        prompt, completion = ([draw.randrange(3, 13) for _ in range(draw.randint(1, most))] for most in (5, 9))
        trained = [draw.randint(0, 1) for _ in completion[:-1]] + [1]
        rows.append({"prompt_ids": prompt, "completion_ids": completion, "trained_tokens": trained})
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), run / "dataset" / "demonstrations.parquet")
    plan_demonstrations(run, number, output)
    return rows


def plan_demonstrations(run: Path, number: int, output: str = "warm-start") -> None:
    """Put the plan of the warm start where the stage does."""
    plan = plan_warm_start(load_config(run / "config.toml"), number, 9)
    (run / output).mkdir()
    (run / output / "plan.json").write_text(json.dumps({"plan": asdict(plan)}))


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "training" / "metrics.jsonl").read_text().splitlines()]


def result_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "training" / "result.json").read_text())


def checkpoint_of(run: Path, step: int) -> dict[str, Any]:
    return torch.load(run / "training" / "checkpoints" / f"step-{step:06d}" / "state.pt", weights_only=True)


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    files = (run / "training" / "model").glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def are_close(first: Path, second: Path) -> bool:
    a, b = weights_of(first), weights_of(second)
    return all(torch.allclose(a[name], b[name], atol=2e-5) for name in a)


def figures_of(run: Path) -> list[dict[str, float]]:
    """The metrics, without times."""
    return [
        {name: value for name, value in row.items() if not ("time" in name or "seconds" in name)}
        for row in metrics_of(run)
    ]


def assert_same(run: Path, whole: Path) -> None:
    """Both trainings did the same and ended with the same weights, bit for bit."""
    model = Path("training") / "model" / "model.safetensors"
    assert figures_of(run) == figures_of(whole)
    assert (run / model).read_bytes() == (whole / model).read_bytes()
    kept, expected = result_of(run), result_of(whole)
    for name in ("counted", "best_step", "best_value", "sampled_completions", "sampled_tokens"):
        assert kept[name] == expected[name]
    for each in (run, whole):
        seconds = sum(row["step_time"] for row in metrics_of(each))
        assert abs(result_of(each)["train_seconds"] - seconds) < 0.01, "each update's time once"


_undisturbed: dict[str, Path] = {}


def interrupted(values: dict[str, Any], tmp_path: Path) -> tuple[Path, Path]:
    """A run that has two checkpoints and lost its end, and its undisturbed twin: one for all tests with these values,
    since both are the same training up to there."""
    values = with_keys(values, max_steps=6, save_steps=2, num_iterations=2)
    known_by = json.dumps({**values, "data": None})
    if known_by not in _undisturbed:
        _undisturbed[known_by] = trained_run(tmp_path / "whole", values)
    run = shutil.copytree(_undisturbed[known_by], tmp_path / "run")
    (run / "training" / "result.json").unlink()
    return run, _undisturbed[known_by]


def write_when_waited_for(patch: pytest.MonkeyPatch) -> None:
    """Each write of a checkpoint begins as late as possible: when something waits for its end."""
    in_thread = checkpoint_write.in_thread

    def late(work: Callable[[], None]) -> Future[None]:
        waited_for = threading.Event()
        done = in_thread(lambda: (waited_for.wait(), work())[-1])
        result = done.result
        done.result = lambda: (waited_for.set(), result())[-1]  # type: ignore[method-assign, assignment]
        return done

    patch.setattr(checkpoint, "in_thread", late)
