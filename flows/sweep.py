"""A sweep: runs the pipeline of each arm in turn, under one flow run, and chooses among the arms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from prefect import flow, get_run_logger, tags
from prefect.client.schemas.objects import State
from prefect.runtime import deployment, flow_run
from prefect.states import Completed

from flows.parameters.allowed import resolve_allowed
from flows.parameters.arms import Arm, Search, Sweep, Values, arm_name
from flows.parameters.form import Changes, Preset, add_changes, read_name
from flows.parameters.search import make_requested_sweep
from flows.pipeline import PRESET, make_pipeline, run_elsewhere
from grpo_core.config.run import RunConfig, is_run_name
from grpo_core.errors import GrpoError
from tasks.reports.events import announce_sweep, announce_sweep_end
from tasks.reports.sweep import NoChoiceError
from tasks.stages.arms import sweep_folder
from tasks.stages.attempts import restore_lost_retry
from tasks.stages.condition import conditions
from tasks.stages.endings import end_in_plain_words
from tasks.stages.errors import Interrupted, StageError
from tasks.stages.locks import locked
from tasks.stages.run_directory import run_folder
from tasks.stages.trials import read_trials
from tasks.sweep import begin, choose, ending, propose
from tasks.tracking.early_stop import shared_level, trainings_of, why_stopped

# Prefect shows this on the deployment's page, as Markdown with every line a paragraph.
DESCRIPTION = """
Several values of some keys, or several seeds: one pipeline run per combination, one after the other, and the best of \
them chosen on the held-out prompts.

Run → Custom run, `grid`: the values of each key, as JSON: `{"train.learning_rate": [1e-5, 3e-5]}`. Or `optuna`: the \
number of arms, and `ranges`: where their values are drawn from, `{"train.learning_rate": "1e-6:1e-4:log"}`. The same \
parameters again continue the sweep. More in `docs/how-to/sweep.md`.
"""


OPTIONS: dict[str, Any] = {
    "name": "sweep",
    "description": DESCRIPTION,
    "validate_parameters": False,  # done by `make_requested_sweep`
    "on_failure": [announce_sweep_end],
    "on_cancellation": [announce_sweep_end],
    "on_crashed": [restore_lost_retry, announce_sweep_end],
}


def _run_name() -> str:
    parameters = flow_run.parameters
    name = parameters["name"] if is_run_name(parameters["name"]) else "refused"
    return f"{read_name(parameters['preset'], parameters['changes'])}.{name}"


@flow(flow_run_name=_run_name, **OPTIONS)
@end_in_plain_words
def sweep(
    preset: Preset = PRESET,
    grid: dict[str, list[Any]] = {},  # noqa: B006 (read only)
    seeds: int = 1,
    name: str = "sweep",
    stop_early: bool = False,
    optuna: int = 0,
    ranges: dict[str, str] = {},  # noqa: B006 (read only)
    changes: Changes = {},  # noqa: B006 (read only)
) -> State[Path]:
    """Run the pipeline with each combination of values, and choose the best arm. The final state's message is the
    verdict, its result the sweep's folder.

    Args:
        preset: The run configuration to start from, a file in configs/. The page of pipeline's deployment shows what
            each sets.
        grid: The values of each key, such as {"train.learning_rate": [1e-5, 3e-5], "algorithm.beta": [0.0, 0.04]}.
        seeds: Trainings of each combination, with seeds of their own.
        name: Name of the sweep, after that of the configuration. The same name goes on with the same sweep.
        stop_early: Stop arms that are shown to be behind. Needs train.eval_steps.
        optuna: How many arms Optuna proposes, one after the other, by what came of those before. Needs ranges.
        ranges: What Optuna draws from, such as {"train.learning_rate": "1e-6:1e-4:log", "train.warmup_steps": "0:20"};
            the values in grid are choices then.
        changes: Only what differs from the preset, in all arms. The menu beside "Parameters" takes JSON instead.
    """

    def load(keys: Values) -> RunConfig:
        return resolve_allowed(preset, add_changes(preset, changes, keys))

    return _run_arms(make_requested_sweep(load, grid, seeds, name, stop_early, optuna, ranges), preset, changes)


def make_sweep_flow(sweep: Sweep) -> Callable[..., Path]:
    """Make the flow of a sweep that the caller has made. Its parameters are only recorded."""

    @flow(flow_run_name=sweep.name, **OPTIONS)
    @end_in_plain_words
    def run_sweep(preset: str, changes: dict[str, Any], options: dict[str, Any]) -> State[Path]:
        return _run_arms(sweep, preset, changes)

    return cast(Callable[..., Path], run_sweep)  # Prefect gives its caller the state's result


def _run_arms(sweep: Sweep, preset: str, changes: dict[str, Any]) -> State[Path]:
    """Run the arms, and choose the best; returns the sweep's folder, with the choice as the state's message. If some
    failed, raises StageError, which names them, once the best of the others is chosen."""
    level = shared_level(sweep.base.evaluation.confidence) if sweep.stop_early else None
    trainings = trainings_of([arm.config for arm in sweep.arms]) if sweep.stop_early else {}
    folder = sweep_folder(sweep.name)
    folder.mkdir(parents=True, exist_ok=True)
    # Two concurrent flows would propose the same values, and take each other's arms for failed.
    with locked(folder, get_run_logger().warning, wait=bool(deployment.id)):
        begin(sweep.name, sweep.base.registry.experiment, trainings, level).result()
        with ending(sweep.name):
            failed = _run_each(sweep, preset, changes)
            try:
                chosen = choose(sweep.name, sweep.base.registry.alias)
                chosen.result()
            except NoChoiceError as error:
                failed["choice"] = str(error)
            if failed:
                reasons = "\n".join(f"{what}: {reason}" for what, reason in failed.items())
                of_arms = f"{len(failed.keys() - {'choice'})} of {sweep.num_arms} arms"
                raise StageError(f"{of_arms} failed; start the sweep again to retry them\n{reasons}")
    announce_sweep(sweep.name, str(flow_run.id))
    return Completed(message=chosen.message, data=folder)


def _run_each(sweep: Sweep, preset: str, changes: dict[str, Any]) -> dict[str, str]:
    """Run each arm that is neither up to date nor stopped; returns those that failed, with the reasons. An arm that
    fails does not keep the others from running."""
    log, failed = get_run_logger(), {}
    for number in range(1, sweep.num_arms + 1):
        try:
            arm = _proposed_arm(sweep, sweep.search, number) if sweep.search else sweep.arms[number - 1]
        except GrpoError as error:
            log.error("arm %s of %s, refused: %s", number, sweep.num_arms, error)
            failed[f"arm {number}"] = str(error)
            continue
        config, place = arm.config, f"arm {number} of {sweep.num_arms}, {arm.config.name}"
        run = run_folder(config.name)
        if run.is_dir() and all(found.is_up_to_date for found in conditions(run, config).values()):
            log.info("%s: up to date, skipped", place)
            continue
        if sweep.stop_early and (reason := why_stopped(run, config)):
            log.info("%s: %s, skipped", place, reason)
            continue
        log.info(place)
        try:
            _run_arm(config, preset, add_changes(preset, changes, arm.keys))
        except Interrupted:
            raise
        except GrpoError as error:
            if sweep.stop_early and (reason := why_stopped(run, config)):
                log.info("%s: %s", place, reason)
                continue
            log.error("%s, failed: %s", place, error)
            failed[config.name] = str(error)
    return failed


def _proposed_arm(sweep: Sweep, search: Search, number: int) -> Arm:
    """Return the arm of a search's trial, counted from 1; if no earlier attempt has proposed it, propose it now. Raises
    GrpoError if its values are refused."""
    trials = read_trials(sweep.name)
    if number <= len(trials):
        return search.make(trials[number - 1])
    names = [arm_name(sweep.base, sweep.name, values) for values in trials]
    return search.make(propose(sweep.name, search.space, sweep.base.seed, names).result())


def _run_arm(config: RunConfig, preset: str, changes: dict[str, Any]) -> None:
    """Run the arm's pipeline: in this process, or, if a deployment started this flow run, by the pipeline's deployment
    of the same name. A signal that stops this flow ends the arm too."""
    if not deployment.id:
        with tags(*flow_run.tags):  # so that the server's crash watch covers the arm's run too
            make_pipeline(config)(preset, changes)
        return
    of_pipeline = f"pipeline/{deployment.name}"
    ended = run_elsewhere(
        of_pipeline,
        {"preset": preset, "changes": changes},
        config.name,
        lambda signal: Interrupted(f"arm {config.name} was interrupted", signal),
    )
    if not (ended.state and ended.state.is_completed()):
        raise StageError(f"flow run {ended.id} of {of_pipeline} is {ended.state}")
