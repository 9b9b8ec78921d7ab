"""Stage 5, register: the model and what explains it into the training's MLflow run; a model version with an alias."""

from __future__ import annotations

import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlflow
from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State

from grpo_core.evaluation_sections import HELD_OUT
from tasks.lineage import lineage_keys
from tasks.stage import EVALUATE, PLAN, REGISTER, TRAIN, Context, run_stage
from tasks.tracking import connect, run_page, tracking_uri, training_run_id


@task(name="register")
def register(run: Path, force: bool = False) -> State[None]:
    return run_stage(REGISTER, run, _work, force)


def _work(context: Context) -> dict[str, Any]:
    config, run, log = context.config, context.run, get_run_logger()
    client, training = connect(), TRAIN.path(run)
    run_id = training_run_id(training)
    name = config.registry.model_name or config.name
    report = EVALUATE.read_receipt(run)
    keys = lineage_keys(config)
    # It warns that a local folder has no model card and no licence on the hub.
    logging.getLogger("mlflow.transformers").setLevel(logging.ERROR)
    with mlflow.start_run(run_id=run_id):
        mlflow.log_metrics({f"plan/{k}": v for k, v in PLAN.read_receipt(run)["plan"].items()})
        mlflow.set_tags({f"lineage.{stage}": key for stage, key in keys.items()})
        for path in (run / "config.toml", PLAN.path(run), training / "result.json", training / "metrics.jsonl"):
            mlflow.log_artifact(str(path))
        mlflow.log_artifacts(str(EVALUATE.path(run)), "evaluation")
        model = mlflow.transformers.log_model(
            str(training / "model"),
            name="model",
            task="text-generation",
            registered_model_name=name,
            pip_requirements=[f"{package}=={version(package)}" for package in ("torch", "transformers")],
        )
    number = str(model.registered_model_version)
    client.set_registered_model_alias(name, config.registry.alias, number)
    policies = report["sets"][HELD_OUT]["policies"]
    accuracy = {policy: policies[policy]["accuracy"]["mean"] for policy in ("base", "trained")}
    tags = {
        "evaluation.accuracy": accuracy["trained"],
        "evaluation.base_accuracy": accuracy["base"],
        "run": config.name,
    }
    for key, value in tags.items():
        client.set_model_version_tag(name, number, key, str(value))
    log.info("registered %s version %s, alias %s", name, number, config.registry.alias)
    experiment_id = client.get_run(run_id).info.experiment_id
    create_markdown_artifact(
        key="registration",
        markdown=f"# {name} version {number}\n\nAlias `{config.registry.alias}`. Held-out accuracy "
        f"{accuracy['trained']:.1%}, of the base model {accuracy['base']:.1%}.\n\nMLflow run: {run_page(run_id)}\n",
        description=f"{name} version {number}, alias {config.registry.alias}",
    )
    return {
        "model_name": name,
        "version": number,
        "alias": config.registry.alias,
        "model_uri": f"models:/{name}/{number}",
        "mlflow_run_id": run_id,
        "mlflow_experiment_id": experiment_id,
        "tracking_uri": tracking_uri(),
    }
