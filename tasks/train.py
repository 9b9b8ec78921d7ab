"""The stage train: runs `grpo_core.train` in supervised processes, and checks its result against the plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.client.schemas.objects import State

from grpo_core import run_files
from grpo_core.config.run import RunConfig
from grpo_core.planning.plan import Plan, load_plan
from tasks.processes.training import check_result, run_training
from tasks.processes.training_machine import check_training_machine
from tasks.processes.vllm_servers import gpus_and_servers
from tasks.reports.cost import training_cost
from tasks.reports.events import announce_training
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
