"""One flow per stage, for an earlier run."""

from __future__ import annotations

from prefect import flow

from tasks.evaluate import evaluate
from tasks.plan import plan
from tasks.register import register
from tasks.storage import storage_root
from tasks.train import train
from tasks.validate import validate


@flow(name="validate", flow_run_name="{run}-validate")
def validate_run(run: str, force: bool = False) -> None:
    validate(storage_root() / "runs" / run)


@flow(name="plan", flow_run_name="{run}-plan")
def plan_run(run: str, force: bool = False) -> None:
    plan(storage_root() / "runs" / run)


@flow(name="train", flow_run_name="{run}-train")
def train_run(run: str, force: bool = False) -> None:
    train(storage_root() / "runs" / run)


@flow(name="evaluate", flow_run_name="{run}-evaluate")
def evaluate_run(run: str, force: bool = False) -> None:
    evaluate(storage_root() / "runs" / run)


@flow(name="register", flow_run_name="{run}-register")
def register_run(run: str, force: bool = False) -> None:
    register(storage_root() / "runs" / run)
