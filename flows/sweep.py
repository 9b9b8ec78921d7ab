"""A sweep: the pipeline of each arm in its turn, under one flow run, and the choice among the arms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, tags
from prefect.runtime import flow_run

from flows.parameters.arms import Grid, Sweep
from flows.parameters.form import changes_of
from flows.pipeline import pipeline_of
from grpo_core.errors import GrpoError
from tasks.stages.condition import conditions
from tasks.stages.endings import plain
from tasks.stages.errors import ArmStopped, Interrupted, StageError
from tasks.stages.run_directory import run_folder
from tasks.sweep import begin, choose
from tasks.tracking.early_stop import why_stopped


def sweep_of(sweep: Sweep) -> Callable[..., Path]:
    """The flow of a sweep that `make_sweep` has made. Its parameters are only recorded."""

    @flow(name="sweep", flow_run_name=sweep.name, validate_parameters=False)
    @plain
    def run_sweep(preset: str, changes: dict[str, Any], grid: Grid) -> Path:
        return _run_arms(sweep, preset)

    return run_sweep


def _run_arms(sweep: Sweep, preset: str) -> Path:
    """Run each arm that is not up to date, and choose among all; returns the sweep's folder. An arm that fails does not
    keep the others from running. Raises StageError, which names those that failed."""
    log, failed = get_run_logger(), {}
    level = 1 - sweep.base.evaluation.confidence if sweep.stop_early else None
    begin(sweep.name, sweep.base.registry.experiment, [arm.config.name for arm in sweep.arms], level).result()
    for number, arm in enumerate(sweep.arms, start=1):
        config, place = arm.config, f"arm {number} of {len(sweep.arms)}"
        run = run_folder(config.name)
        if run.is_dir() and all(found.is_up_to_date for found in conditions(run, config).values()):
            log.info("%s, %s: up to date, skipped", place, config.name)
            continue
        if sweep.stop_early and (reason := why_stopped(run, config)):
            log.info("%s, %s: %s, skipped", place, config.name, reason)
            continue
        log.info("%s: %s", place, config.name)
        try:
            with tags(*flow_run.tags):  # by which the server's watch recognises the arm's run too
                pipeline_of(config)(preset, changes_of(Path(preset), arm.overrides))
        except Interrupted:
            raise
        except ArmStopped as stopped:
            log.info("%s, %s: %s", place, config.name, stopped)
        except GrpoError as error:
            log.error("%s, %s, failed: %s", place, config.name, error)
            failed[config.name] = str(error)
    folder = choose(sweep.name, sweep.base.registry.alias).result()
    if failed:
        reasons = "\n".join(f"{arm}: {reason}" for arm, reason in failed.items())
        raise StageError(f"{len(failed)} of {len(sweep.arms)} arms failed; the same again tries them again\n{reasons}")
    return folder
