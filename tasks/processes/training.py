"""A training's processes from start to end, and whether what they have done is what was planned."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from logging import Logger, LoggerAdapter
from pathlib import Path
from typing import Any, Literal

from grpo_core import run_files
from grpo_core.planning.plan import Plan
from grpo_core.planning.tokens_per_pass import read_limit
from tasks.processes.launch import launch_with_restarts
from tasks.processes.run import ProcessError, TakenError
from tasks.stages.condition import saved_updates
from tasks.stages.errors import StageError
from tasks.stages.files import read_json
from tasks.stages.run import Context


def run_training(
    context: Context,
    on_line: Callable[[str], None],
    environment: dict[str, str],
    log: Logger | LoggerAdapter[Any],
    options: Sequence[str] = (),
) -> None:
    """Run the training's processes, with these options. They are started again, from the newest checkpoint,

    - up to train.max_restarts times, if one was killed or its machine is gone;
    - if a process that shares a model ran out of memory, as long as tokens per pass decrease each time;
    - if a scheduler took the machines away, as long as there is a newer checkpoint each time.
    """
    folder = context.partial
    limit, saved = read_limit(folder), saved_updates(folder)

    def after(error: ProcessError) -> Literal["done", "again", "restart"]:
        nonlocal limit, saved
        before, limit = limit, read_limit(folder)
        older, saved = saved, saved_updates(folder)
        if limit != before:
            log.warning("memory ran out: the training starts again with %d tokens per pass", limit)
            return "again"
        if error.restartable and read_json(folder / run_files.RESULT):
            return "done"  # it was killed after everything was written
        if isinstance(error, TakenError) and saved > older:
            log.warning("the machines were taken away; going on from step %d on other ones: %s", saved, error)
            return "again"
        return "restart"

    command = ["-m", "grpo_core.train", str(context.run), "--output", str(folder), *options]
    launch_with_restarts(context.config, command, log, folder, environment, on_line, after)


def check_result(result: dict[str, Any], metrics: Path, plan: Plan) -> None:
    """Raises StageError if the training's counts differ from the plan's (up to the step at which it stopped early), or
    if a figure in its metrics is not finite."""
    updates = result["stopped_early_at_step"] or plan.max_steps
    expected = plan.counts(updates)
    if result["counted"] != expected:
        raise StageError(f"the plan says {expected}, the training counted {result['counted']}: its result is not used")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    recorded = [step for step in range(1, updates + 1) if step not in result["steps_without_metrics"]]
    if [step["step"] for step in steps] != recorded:
        raise StageError(f"{metrics} does not hold each of the {updates} steps once: its result is not used")
    for step in steps:
        if broken := [name for name, value in step.items() if not math.isfinite(value)]:
            raise StageError(
                f"step {step['step']}: {broken[0]} is {step[broken[0]]}; a model with such a step is not used"
            )
