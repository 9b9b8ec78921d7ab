"""The pipeline: validate → plan → train → evaluate → register, one task each, meeting in the run directory."""

from __future__ import annotations

from pathlib import Path

from prefect import flow, get_run_logger

from grpo_core.config import RunConfig
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
    with open_run(config, get_run_logger().warning) as run:
        validate(run)
        plan(run)
        train(run)
        evaluate(run)
        register(run)
    return run
