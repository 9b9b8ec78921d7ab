"""The pipeline: the stages in order, one task each, which share only the run directory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import groupby
from logging import Logger, LoggerAdapter
from pathlib import Path
from typing import Any, cast

from prefect import flow, get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import FlowRun
from prefect.client.schemas.objects import State
from prefect.deployments import run_deployment
from prefect.exceptions import ExternalSignal, PrefectException, PrefectHTTPStatusError
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelling, Completed

from flows.parameters.allowed import resolve_allowed
from flows.parameters.early_refusals import refuse_early
from flows.parameters.form import Changes, Preset, default_preset, describe_presets, read_name, resolve
from grpo_core.config.files import DATE
from grpo_core.config.run import RunConfig
from tasks.promotion import promote_or_ask
from tasks.registry.approval import WAITING
from tasks.registry.champion import is_decided
from tasks.reports.events import announce_completed, announce_end
from tasks.stages.attempts import restore_lost_retry
from tasks.stages.base_model import with_checkpoint
from tasks.stages.condition import conditions
from tasks.stages.endings import end_in_plain_words
from tasks.stages.errors import Interrupted, StageError
from tasks.stages.mlflow_address import refuse_unreachable_server
from tasks.stages.run import SKIPPED, describe_interruption
from tasks.stages.run_directory import open_run, run_folder
from tasks.stages.table import ALL_STAGES, GPU_DEPLOYMENT, REGISTER, STAGES, Stage, stages_of

POLL_SECONDS = 2.0
PRESET = default_preset()
TASKS = {stage: stage.load_task() for stage in ALL_STAGES}
NOTHING_TO_DO = (
    "nothing to do: every stage of {run} is up to date. To train again, give the run another name; one with {date} in "
    "it is new each day"
)
# Prefect shows this on the deployment's page, as Markdown with every line a paragraph.
DESCRIPTION = f"""
From prompts and a base model to a registered, evaluated policy: {" → ".join(stage.name for stage in STAGES)}.

1. **Start**: Run → Custom run. `preset` is the configuration to start from, one of those below; under `changes`, fill \
in only the keys you want to change, those that most runs change first. The menu beside "Parameters" takes JSON \
instead. Another `name` makes another run beside the first; with the same name, finished stages are skipped.
2. **Watch**: the run's page has the log and, under Artifacts, data report, plan, live figures, curves, evaluation and \
the link to the MLflow run.
3. **Cancel** saves the training's state. **Retry**, or the same run started again, continues from there.

Run → Quick run takes {f"the preset `{PRESET}` unchanged" if PRESET else "no preset: choose one"}. The \
deployments with the tag `stage` each run that stage of an earlier run again. More in `docs/how-to/run.md`.
"""


def describe() -> str:
    """Text of the deployment's page: how to use it, and what each preset sets now."""
    return f"{DESCRIPTION}\n{describe_presets()}"


OPTIONS: dict[str, Any] = {
    "name": "pipeline",
    "description": describe(),
    "validate_parameters": False,  # done by `resolve`, which names the nearest key
    "on_failure": [announce_end],
    "on_cancellation": [announce_end],
    "on_crashed": [restore_lost_retry, announce_end],
}


@flow(flow_run_name=lambda: read_name(**flow_run.parameters), **OPTIONS)
@end_in_plain_words
def pipeline(preset: Preset = PRESET, changes: Changes = {}) -> State[Path]:  # noqa: B006 (read only)
    """Take the configured prompts and base model to a registered, evaluated policy. The final state's message is the
    verdict, its result the run directory.

    A stage whose output is up to date is skipped, so running the same configuration again continues where it stopped.

    Args:
        preset: The run configuration to start from, a file in configs/. The deployment's page shows what each sets.
        changes: Only what differs from the preset; an empty field is as in the preset. Another name makes another run
            beside the first. First come the keys that most runs change, then all, by section. The menu beside
            "Parameters" takes JSON instead.
    """
    config = resolve_allowed(preset, changes) if deployment.id else resolve(preset, changes)
    refuse_early(config)
    return _run_stages(config)


def make_pipeline(config: RunConfig) -> Callable[..., Path]:
    """Make the pipeline of a configuration that the caller has parsed and `refuse_early` has passed. Its parameters,
    preset and changes, are only recorded."""

    @flow(flow_run_name=config.name, **OPTIONS)
    @end_in_plain_words
    def pipeline(preset: str, changes: dict[str, Any]) -> State[Path]:
        return _run_stages(config)

    return cast(Callable[..., Path], pipeline)  # Prefect gives its caller the state's result


def _run_stages(config: RunConfig) -> State[Path]:
    """Run the stages in order, each here or by its deployment. Returns the run directory, with the verdict and what
    came of the version as the state's message."""
    refuse_unreachable_server()
    config = with_checkpoint(config, get_run_logger().info)
    run, gpu, worked, decision = run_folder(config.name), os.environ.get(GPU_DEPLOYMENT), False, ""
    for is_elsewhere, stages in groupby(stages_of(config), lambda stage: bool(gpu) and stage.gpu):
        if is_elsewhere:  # the run directory is unlocked meanwhile: the flows of these stages lock it
            for stage in stages:
                worked |= _hand_over(stage, run, config, f"{stage.name}/{gpu}")
            continue
        # A deployment's run waits for the lock: if it were refused, nothing would start it again.
        with open_run(config, get_run_logger().warning, wait=bool(deployment.id)):
            for stage in stages:
                state = TASKS[stage](run, config)
                state.result()
                worked |= state.name != SKIPPED
                if stage is REGISTER:
                    decision = _promote(config, run)
    verdict = announce_completed(run, config, str(flow_run.id))
    if worked or decision:
        return Completed(message=f"{verdict}; {decision or f'{_version(run)} registered'}", data=run)
    message = NOTHING_TO_DO.format(run=run.name, date=DATE)
    get_run_logger().info(message)
    return Completed(message=message, data=run)


def _version(run: Path) -> str:
    registered = REGISTER.read_receipt(run)
    return f"{registered['model_name']} version {registered['version']}"


def _promote(config: RunConfig, run: Path) -> str:
    """Try once to promote the version that the run has registered. A version that is decided already is left alone.
    Returns what came of it; "" if it was not tried."""
    if not config.promotion.automatic:
        return ""
    registered = REGISTER.read_receipt(run)
    model, version = registered["model_name"], registered["version"]
    if is_decided(model, version):
        get_run_logger().info("promote: already decided for %s version %s, skipped", model, version)
        return ""
    outcome = promote_or_ask(model, version, force=False, changes={})
    if outcome.decision == WAITING:
        get_run_logger().warning(
            "`grpo promote %s --approve NAME`, or --reject NAME, answers for version %s", model, version
        )
    return f"{_version(run)} {'waits for approval' if outcome.decision == WAITING else outcome.decision}"


def _hand_over(stage: Stage, run: Path, config: RunConfig, gpu_deployment: str) -> bool:
    """Run a stage by its deployment, which may be on another work pool, and return True, unless it is up to date. A
    signal that stops this flow cancels the deployment's run and raises Interrupted. Raises StageError if that run does
    not complete."""
    log = get_run_logger()
    if conditions(run, config)[stage.name].is_up_to_date:
        log.info("%s: up to date, skipped", stage.name)
        return False
    child = run_elsewhere(
        gpu_deployment,
        {"run": run.name},
        f"{run.name}-{stage.name}",
        lambda signal: describe_interruption(stage, run, config, signal),
    )
    if not (child.state and child.state.is_completed()):
        raise StageError(f"{stage.name}: flow run {child.id} of {gpu_deployment} is {child.state}")
    return True


def run_elsewhere(
    of_deployment: str, parameters: dict[str, Any], name: str, interrupted: Callable[[BaseException], Interrupted]
) -> FlowRun:
    """Run a deployment and return its flow run once it has ended. A signal that stops this flow cancels that run, and
    raises the error that `interrupted` makes of the signal."""
    log = get_run_logger()
    child = run_deployment(of_deployment, parameters=parameters, flow_run_name=name, timeout=0)
    assert isinstance(child, FlowRun)  # a coroutine only where an event loop runs
    log.info("%s: handed over to %s, flow run %s", name, of_deployment, child.id)
    with get_client(sync_client=True) as client:
        try:
            return _wait_for(client, child, log)
        except (ExternalSignal, KeyboardInterrupt) as signal:
            client.set_flow_run_state(child.id, Cancelling())
            raise interrupted(signal) from signal


def _wait_for(client: SyncPrefectClient, run: FlowRun, log: Logger | LoggerAdapter[Any]) -> FlowRun:
    """Wait until the flow run has ended and return it, however long Prefect's server is away meanwhile.

    Raises a refusal, which has an exception of Prefect's own. Every other error is logged once and waited out, because
    its type depends on the HTTP client that this release of Prefect uses.
    """
    is_away = False
    while not (run.state and run.state.is_final()):
        time.sleep(POLL_SECONDS)
        try:
            run, is_away = client.read_flow_run(run.id), False
        except (PrefectException, PrefectHTTPStatusError):
            raise
        except Exception as error:
            if not is_away:
                log.warning("flow run %s cannot be read: %r; waiting for Prefect's server", run.id, error)
            is_away = True
    return run
