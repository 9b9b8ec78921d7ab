"""The stage train: runs `grpo_core.train` in supervised processes, and checks its result against the plan."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import Logger, LoggerAdapter
from pathlib import Path
from typing import Any, Literal

from prefect import get_run_logger, task
from prefect.client.schemas.objects import State

from grpo_core import run_files
from grpo_core.config.run import RunConfig
from grpo_core.planning.plan import Plan, load_plan
from grpo_core.planning.tokens_per_pass import read_limit
from tasks.processes.launch import launch_with_restarts
from tasks.processes.run import ProcessError, TakenError
from tasks.processes.training_machine import check_training_machine
from tasks.processes.vllm_servers import gpus_and_servers
from tasks.reports.cost import training_cost
from tasks.reports.events import announce_training
from tasks.stages.condition import saved_updates
from tasks.stages.errors import StageError
from tasks.stages.files import read_json
from tasks.stages.mlflow_address import first_cause
from tasks.stages.run import SKIPPED, Context, run_stage
from tasks.stages.table import PLAN, TRAIN
from tasks.tracking.early_stop import Race
from tasks.tracking.live import OUTPUT, Live, Output, show_curves
from tasks.tracking.runs import brief_requests, connect, open_tracking_run, run_address, run_page
from tasks.tracking.sending import sending
from tasks.tracking.traces import tracing


@task(name="train")
def train(run: Path, config: RunConfig, force: bool = False) -> State[None]:
    try:
        state = run_stage(TRAIN, run, config, _work, force)
    except Exception as error:
        announce_training(run, config, "failed", str(error))
        raise
    if state.name != SKIPPED:
        announce_training(run, config, "completed" if state.is_completed() else "stopped", state.message or "")
    return state


def _work(context: Context) -> dict[str, Any]:
    check_training_machine(context.config)
    plan, folder = load_plan(PLAN.path(context.run)), context.partial
    tracked = open_tracking_run(context.config, context.run, folder)
    get_run_logger().info("MLflow run: %s", run_address(folder))
    # Otherwise the training had finished, and the stage was killed before publishing it.
    if not read_json(folder / TRAIN.receipt):
        log = get_run_logger()
        with (
            gpus_and_servers(context, log, is_training=True) as addresses,
            sending(folder, tracked, log),
            tracing(folder, tracked, context.config, log),
            _logging_cost(context.config, folder, tracked),
            _showing_progress(folder, plan) as on_line,
        ):
            race = Race(context.run, context.config, folder, plan.max_steps)

            def watched(line: str) -> None:
                on_line(line)
                race.look()

            run_training(context, watched, addresses, log)
    result = json.loads((folder / TRAIN.receipt).read_text())
    check_result(result, folder / run_files.METRICS, plan)
    return result


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
        if error.restartable and read_json(folder / TRAIN.receipt):
            return "done"  # it was killed after everything was written
        if isinstance(error, TakenError) and saved > older:
            log.warning("the machines were taken away; going on from step %d on other ones: %s", saved, error)
            return "again"
        return "restart"

    command = ["-m", "grpo_core.train", str(context.run), "--output", str(folder), *options]
    launch_with_restarts(context.config, command, log, folder, environment, on_line, after)


@contextmanager
def _logging_cost(config: RunConfig, folder: Path, tracked: Mapping[str, Any]) -> Iterator[None]:
    """However the training ends, log what it has cost so far to its MLflow run."""
    try:
        yield
    finally:
        try:
            with brief_requests():
                client = connect()
                for name, value in training_cost(folder, config).metrics.items():
                    client.log_metric(tracked["run_id"], name, value)
        except Exception as error:  # MLflow may be away; `register` logs it again
            get_run_logger().warning("the training's cost could not be logged: %s", first_cause(error))


@contextmanager
def _showing_progress(folder: Path, plan: Plan) -> Iterator[Callable[[str], None]]:
    """Give a function that takes the training's output line by line, for the log and the artifacts. However the
    training ends, the figures that it wrote are shown."""
    log = get_run_logger()
    output, live = Output(folder / OUTPUT, log), Live(folder / run_files.METRICS, plan, run_page(folder))

    def on_line(line: str) -> None:
        output.line(line)
        live.refresh()

    try:
        yield on_line
    finally:
        output.close()
        live.show()
        try:
            show_curves(folder)
        except Exception as error:  # a failed picture must neither fail a training nor hide its failure
            log.warning("the curves could not be shown: %s", error)


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
