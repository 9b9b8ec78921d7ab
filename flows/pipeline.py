"""The pipeline: validate → plan → train → evaluate → register, one task each, meeting in the run directory."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from grpo_core.config import RunConfig
from tasks.attempts import close_left_open
from tasks.evaluate import evaluate
from tasks.plan import plan
from tasks.register import register
from tasks.storage import open_run
from tasks.train import train
from tasks.validate import validate


@flow(name="grpo-pipeline", flow_run_name="{config.name}")
def pipeline(config: RunConfig) -> Path:
    """Take the configured prompts and base model to a registered, evaluated policy; returns the run directory.

    A stage whose output is up to date is skipped, so running the same configuration again continues where it stopped.
    """
    close_left_open()
    run = open_run(config)
    validate(run)
    plan(run)
    train(run)
    evaluate(run)
    register(run)
    return run
