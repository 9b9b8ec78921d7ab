"""Stage 3, train: `accelerate launch -m grpo_core.train` in a supervised process, then checked against the plan."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import get_run_logger, task
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.client.schemas.objects import State

from grpo_core.plan import Plan, load_plan
from tasks.data_report import FINDINGS, PICTURE, REPORT
from tasks.process import run_process
from tasks.stage import PLAN, TRAIN, VALIDATE, Context, StageError, run_stage
from tasks.tracking import connect, open_tracking_run, tracking_uri

SECONDS_BETWEEN_UPDATES = 2.0


@task(name="train")
def train(run: Path, force: bool = False) -> State[None]:
    return run_stage(TRAIN, run, _work, force)


def _work(context: Context) -> dict[str, Any]:
    log = get_run_logger()
    plan = load_plan(PLAN.path(context.run))
    run_id = open_tracking_run(context.config, context.partial)
    for file in (REPORT, FINDINGS, PICTURE):
        connect().log_artifact(run_id, str(VALIDATE.path(context.run) / file), "dataset")
    progress = create_progress_artifact(
        progress=0.0, key="training-progress", description=f"0/{plan.max_steps} updates"
    )
    metrics = context.partial / "metrics.jsonl"
    shown = time.monotonic()

    def on_line(line: str) -> None:
        nonlocal shown
        (log.warning if line.startswith("health:") else log.info)(line)
        if time.monotonic() - shown > SECONDS_BETWEEN_UPDATES:
            shown = time.monotonic()
            _show_progress(progress, metrics, plan)

    run_process(
        [
            *(*_launcher(context), "-m", "grpo_core.train", str(context.run)),
            *("--output", str(context.partial), "--report-to", "mlflow"),
        ],
        on_line,
        env={"MLFLOW_TRACKING_URI": tracking_uri(), "MLFLOW_RUN_ID": run_id, **_process_environment(context)},
    )
    _show_progress(progress, metrics, plan)
    result = json.loads((context.partial / "result.json").read_text())
    check_result(result, metrics, plan)
    return result


def check_result(result: dict[str, Any], metrics: Path, plan: Plan) -> None:
    """StageError when the training did not do what the plan says, up to where it stopped early, or a figure in its
    metrics is not finite."""
    updates = result["stopped_early_at_step"] or plan.max_steps
    expected = plan.counts(updates)
    if result["counted"] != expected:
        raise StageError(f"the plan says {expected}, the training counted {result['counted']}: its result is not used")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    if [step["step"] for step in steps] != list(range(1, updates + 1)):
        raise StageError(f"{metrics} does not hold each of the {updates} steps once: its result is not used")
    for step in steps:
        broken = [name for name, value in step.items() if not math.isfinite(value)]
        if broken:
            raise StageError(
                f"step {step['step']}: {broken[0]} is {step[broken[0]]}; a model with such a step is not used"
            )


def _launcher(context: Context) -> list[str]:
    """Arguments of `python` that start the configured number of processes, and warn of nothing left to default."""
    train = context.config.train
    threads = max(1, (os.cpu_count() or 1) // train.num_processes)
    return [
        *("-m", "accelerate.commands.launch"),
        *("--num_processes", str(train.num_processes)),
        *(["--multi_gpu", "--main_process_port", "0"] if train.num_processes > 1 else []),
        *("--num_machines", "1", "--dynamo_backend", "no", "--mixed_precision", train.mixed_precision),
        *("--num_cpu_threads_per_process", os.environ.get("OMP_NUM_THREADS", str(threads))),
    ]


def _process_environment(context: Context) -> dict[str, str]:
    """Several processes without a GPU: Accelerate's launcher starts them as for GPUs, on the CPU (gloo)."""
    import torch

    several_on_cpu = context.config.train.num_processes > 1 and not torch.cuda.is_available()
    return {"ACCELERATE_USE_CPU": "true"} if several_on_cpu else {}


def _show_progress(artifact: UUID, metrics: Path, plan: Plan) -> None:
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    if not lines:
        return
    last = json.loads(lines[-1])
    update_progress_artifact(
        artifact_id=artifact,
        progress=100.0 * last["step"] / plan.max_steps,
        description=f"{last['step']}/{plan.max_steps} updates, reward {last['reward']:.3f}",
    )
