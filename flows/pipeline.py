"""The pipeline: validate → plan → train → evaluate → register, one task each, meeting in the run directory."""

from __future__ import annotations

import os
import time
from logging import Logger, LoggerAdapter
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas import FlowRun
from prefect.deployments import run_deployment
from prefect.exceptions import ExternalSignal, PrefectException, PrefectHTTPStatusError
from prefect.runtime import deployment, flow_run
from prefect.states import Cancelling

from flows.parameters.allowed import resolve_allowed
from flows.parameters.early import refuse_early
from flows.parameters.form import Changes, Preset, resolve
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from tasks.evaluate import evaluate
from tasks.plan import GPU_DEPLOYMENT, plan
from tasks.promotion import promote
from tasks.register import register
from tasks.registry.champion import is_decided
from tasks.stages.attempts import keep_retry
from tasks.stages.refusals import plain
from tasks.stages.run_directory import open_run
from tasks.stages.stage import EVALUATE, REGISTER, TRAIN, Stage, StageError, conditions
from tasks.train import train
from tasks.validate import validate

POLL_SECONDS = 2.0
# Prefect shows it on the page of the deployment, as Markdown with every line a paragraph.
DESCRIPTION = """
From prompts and a base model to a registered, evaluated policy: validate → plan → train → evaluate → register.

1. **Start**: Run → Custom run. `preset` is the configuration to start from; under `changes`, fill in only the \
keys you want to change. With another `name` there is another run beside the first; with the same, finished stages \
are skipped.
2. **Watch**: the run's page has the log and, under Artifacts, data report, plan, live figures, curves, evaluation and \
the link to the MLflow run.
3. **Cancel** saves the training's state. **Retry**, or the same run started again, goes on from there.

Run → Quick run takes the preset `quickstart` as it is; `make quickstart` builds its inputs. The other deployments run \
one stage of an earlier run again. More in `docs/how-to/run.md`.
"""


def _run_name() -> str:
    try:
        return resolve(**flow_run.parameters).name
    except ConfigError:  # said by the flow itself
        return "refused"


# Parameters are validated by `resolve`, which names the nearest key.
@flow(
    name="pipeline",
    description=DESCRIPTION,
    flow_run_name=_run_name,
    validate_parameters=False,
    on_crashed=[keep_retry],
)
@plain
def pipeline(preset: Preset = "quickstart", changes: Changes = {}) -> Path:  # noqa: B006 (read only)
    """Take the configured prompts and base model to a registered, evaluated policy; returns the run directory.

    A stage whose output is up to date is skipped, so running the same configuration again continues where it stopped.

    Args:
        preset: The run configuration to start from, a file in configs/.
        changes: Only what differs from the preset; an empty field is as in the preset. With another name there is
            another run beside the first.
    """
    config = resolve_allowed(preset, changes) if deployment.id else resolve(preset, changes)
    refuse_early(config)
    say, wait = (
        get_run_logger().warning,
        bool(deployment.id),
    )  # a refused flow run of a deployment is not started again by itself
    with open_run(config, say, wait) as run:
        validate(run).result()
        plan(run).result()
        if not (gpu := os.environ.get(GPU_DEPLOYMENT)):
            train(run).result()
            evaluate(run).result()
            register(run).result()
            _promote(config, run)
            return run
    # The run directory is theirs meanwhile.
    for stage in (TRAIN, EVALUATE):
        _hand_over(stage, run, f"{stage.name}/{gpu}")
    with open_run(config, say, wait) as run:
        register(run).result()
        _promote(config, run)
    return run


def _promote(config: RunConfig, run: Path) -> None:
    """Try to promote the version that the run has registered, once: what a person made of it afterwards stands."""
    if not config.promotion.automatic:
        return
    registered = REGISTER.read_receipt(run)
    model, version = registered["model_name"], registered["version"]
    if is_decided(model, version):
        get_run_logger().info("promote: decided on for %s version %s already, skipped", model, version)
        return
    promote(model, version, force=False, changes={})


def _hand_over(stage: Stage, run: Path, deployment: str) -> None:
    """Have a stage done by its deployment, on another work pool perhaps, unless it is up to date. What stops this flow
    cancels that one. StageError when it does not complete."""
    log = get_run_logger()
    if conditions(run)[stage.name].is_up_to_date:
        log.info("%s: up to date, skipped", stage.name)
        return
    name = f"{run.name}-{stage.name}"
    child = run_deployment(deployment, parameters={"run": run.name}, flow_run_name=name, timeout=0)
    assert isinstance(child, FlowRun)  # a coroutine only where an event loop runs
    log.info("%s: handed over to %s, flow run %s", stage.name, deployment, child.id)
    with get_client(sync_client=True) as client:
        try:
            child = _wait_for(client, child, log)
        except (ExternalSignal, KeyboardInterrupt):
            client.set_flow_run_state(child.id, Cancelling())
            raise
    if not (child.state and child.state.is_completed()):
        raise StageError(f"{stage.name}: flow run {child.id} of {deployment} is {child.state}")


def _wait_for(client: SyncPrefectClient, run: FlowRun, log: Logger | LoggerAdapter[Any]) -> FlowRun:
    """The flow run when it has ended, however long Prefect's server is away meanwhile.

    A refusal, which has an exception of Prefect's own, is raised. Whatever else keeps an answer away is reported once
    and waited out: which exception says so depends on the HTTP client that this release of Prefect uses.
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
