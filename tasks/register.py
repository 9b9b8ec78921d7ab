"""The stage register: complete the training's MLflow run, and make a model version with an alias."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
from mlflow import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE
from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State

from grpo_core.config.evaluation import HELD_OUT
from grpo_core.config.run import RunConfig
from grpo_core.data.chat import is_conversation, without_gaps
from grpo_core.data.prompts import load_tokenizer
from tasks.registry.champion import RECORD, RECORDED
from tasks.registry.model_version import Example, log_version
from tasks.rendering import figures
from tasks.rendering.markdown import escape
from tasks.reports.report import PAGE, headline
from tasks.stages.lineage import lineage_keys
from tasks.stages.mlflow_address import tracking_uri
from tasks.stages.parts import key_of
from tasks.stages.run import Context, run_stage
from tasks.stages.table import EVALUATE, PLAN, REGISTER, TRAIN
from tasks.tracking.live import CURVES
from tasks.tracking.runs import (
    LINEAGE,
    answering,
    commit_text,
    connect,
    dataset_digests,
    lineage_text,
    read_tracking_run,
    run_page,
    trained_on_commit,
)
from tasks.tracking.sending import send_rest

PLAN_TAGS = ("num_prompts", "max_steps", "completions")
CHARTS = "^(reward$|rewards/|eval_|entropy$|kl$|completions/mean_length$)"  # the charts to look at first


@task(name="register")
def register(run: Path, config: RunConfig, force: bool = False) -> State[None]:
    return run_stage(REGISTER, run, config, _work, force)


def _work(context: Context) -> dict[str, Any]:
    config, run, log = context.config, context.run, get_run_logger()
    client, training = connect(), TRAIN.path(run)
    tracked = read_tracking_run(training)
    run_id = tracked["run_id"]
    with answering():
        client.get_run(run_id)
    name = config.registry.model_name or config.name
    report, keys = EVALUATE.read_receipt(run), lineage_keys(config)
    send_rest(client, run_id, training, log)
    metric = figures.metric_of(config, report)
    verdict, commit = describe(report, metric), trained_on_commit(client, run_id)
    client.set_tag(run_id, LINEAGE, lineage_text(config))  # evaluation may have been edited since the training
    client.set_tag(run_id, MLFLOW_RUN_NOTE, _note(run, verdict))
    for path in (run / "config.toml", PLAN.path(run), training / "result.json", training / "metrics.jsonl"):
        client.log_artifact(run_id, str(path))
    if (curves := training / CURVES).exists():
        client.log_artifact(run_id, str(curves), "training")
    client.log_artifacts(run_id, str(EVALUATE.path(run)), "evaluation")
    tags = {**_tags(config, run, report), **commit, RECORD: keep_record(client, run_id, run, keys[REGISTER.name])}
    scratch = context.partial.with_name("model.partial")
    description = f"{verdict}\n\n{origin(config.name, commit, dataset_digests(run))}"
    number = log_version(run_id, training, scratch, name, _example(config, run), tags, description)
    client.set_registered_model_alias(name, config.registry.alias, number)
    client.set_terminated(run_id)
    log.info("registered %s version %s, alias %s", name, number, config.registry.alias)
    policies = report["sets"][HELD_OUT]["policies"]
    base, trained = (figures.amount(metric, policies[policy][metric]["mean"]) for policy in ("base", "trained"))
    create_markdown_artifact(
        key="registration",
        markdown=f"# {escape(name)} version {number}\n\nAlias {escape(config.registry.alias)}. "
        f"{escape(f'Held-out {metric} {trained}, of the base model {base}.')}\n\nMLflow run: {run_page(training)}\n",
        description=escape(f"{name} version {number}, alias {config.registry.alias}"),
    )
    return {
        "model_name": name,
        "version": number,
        "alias": config.registry.alias,
        "model_uri": f"models:/{name}/{number}",
        "mlflow_run_id": run_id,
        "mlflow_experiment_id": tracked["experiment_id"],
        "tracking_uri": tracking_uri(),
    }


def describe(report: dict[str, Any], metric: str) -> str:
    """The result of an evaluation as Markdown: a sentence, its figures below."""
    verdict = headline(report, metric)
    return f"**{verdict.headline}.**\n\n{verdict.sentence}".strip()


def origin(run: str, commit: Mapping[str, str], data: Mapping[str, str]) -> str:
    """Which run, code and data made a version, as Markdown."""
    code = f" at commit {commit_text(commit)}" if commit else ""
    digests = ", ".join(f"{name} {digest}" for name, digest in data.items())
    return f"Trained by run `{run}`{code}, on validated data {digests}."


def _note(run: Path, verdict: str) -> str:
    """Description of the training's MLflow run, as Markdown."""
    report = EVALUATE.path(run) / PAGE
    return (
        f"{verdict}\n\nOn one page: {report.parent.name}/{PAGE} under Artifacts (`{report}`). Charts to begin with: "
        f"Model metrics, search `{CHARTS}`."
    )


def keep_record(client: MlflowClient, run_id: str, run: Path, key: str) -> str:
    """Log the files that a version is judged by to their own folder in the MLflow run, which all versions of a training
    share; returns the folder. `key`: the lineage key of the registration."""
    record = f"registered/{key_of(key, EVALUATE.read_receipt(run).get('made'))[:12]}"
    for path in RECORDED:
        client.log_artifact(run_id, str(run / path), str(Path(record, path).parent))
    return record


def _example(config: RunConfig, run: Path) -> Example:
    """The first held-out prompt, after the chat template, and the trained policy's completion."""
    samples = pl.read_parquet(EVALUATE.path(run) / "samples.parquet").filter(set=HELD_OUT)
    prompt, completion = samples["prompt"][0], samples["trained/completion"][0]
    if is_conversation(prompt):
        conversation = without_gaps(prompt)
        prompt = load_tokenizer(config.model).apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True, **config.data.chat_template_kwargs
        )
    return Example(prompt, completion)


def _tags(config: RunConfig, run: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Tags of the model version: its run, its data, and its figures."""
    plan, metric = PLAN.read_receipt(run)["plan"], figures.metric_of(config, report)
    return {
        "run": config.name,
        **{
            f"evaluation.{name}.{policy}.{metric}": f"{of_policy[metric]['mean']:.4f}"
            for name, found in report["sets"].items()
            for policy, of_policy in found["policies"].items()
        },
        **{f"plan.{key}": plan[key] for key in PLAN_TAGS},
        **{f"data.{name}": digest for name, digest in dataset_digests(run).items()},
    }
