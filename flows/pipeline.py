"""The pipeline: validate → plan → train → evaluate → register, one task each, meeting in the run directory."""

from __future__ import annotations

from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run

from flows.form import Changes, Preset, resolve
from grpo_core.config import ConfigError
from tasks.evaluate import evaluate
from tasks.plan import plan
from tasks.register import register
from tasks.storage import open_run
from tasks.train import train
from tasks.validate import validate


def _run_name() -> str:
    try:
        return resolve(**flow_run.parameters).name
    except ConfigError:  # said by the flow itself
        return "refused"


# Parameters are validated by `resolve`, which names the nearest key.
@flow(name="pipeline", flow_run_name=_run_name, validate_parameters=False)
def pipeline(preset: Preset = "quickstart", changes: Changes = {}) -> Path:  # noqa: B006 (read only)
    """Take the configured prompts and base model to a registered, evaluated policy; returns the run directory.

    A stage whose output is up to date is skipped, so running the same configuration again continues where it stopped.

    Args:
        preset: the run configuration to start from, a file in configs/.
        changes: keys that differ from the preset; what is left empty is as in the preset. Another name makes another
            run beside it.
    """
    run = open_run(resolve(preset, changes))
    validate(run)
    plan(run)
    train(run)
    evaluate(run)
    register(run)
    return run
