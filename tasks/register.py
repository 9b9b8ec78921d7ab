"""The stage register: completes the training's MLflow run, and makes a model version with an alias."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE
from prefect import get_run_logger, task
from prefect.client.schemas.objects import State

from grpo_core import run_files
from grpo_core.config.evaluation import HELD_OUT
from grpo_core.config.run import RunConfig
from grpo_core.data.chat import is_conversation, without_gaps
from grpo_core.data.images import beside
from grpo_core.data.prompts import load_tokenizer
from grpo_core.environments.setting import make_setting
from grpo_core.system.tables import read_parquet
from tasks.registry.answering import Answering, answering_of
from tasks.registry.asking import ask_version
from tasks.registry.judging import RECORD, RECORDED, prompts_tags
from tasks.registry.lookup import find_version
from tasks.registry.model_version import Example, log_version
from tasks.rendering import figures
from tasks.rendering.markdown import escape
from tasks.reports.cost import run_cost
from tasks.reports.report import PAGE, headline
from tasks.stages.dependencies import hash_values
from tasks.stages.lineage import lineage_keys
from tasks.stages.mlflow_address import TrackingError, first_cause, tracking_uri
from tasks.stages.run import Context, run_stage
from tasks.stages.table import EVALUATE, PLAN, REGISTER, TRAIN, WARM_START
from tasks.tracking.artifacts import show_markdown
from tasks.tracking.evaluated import log_checkpoints, log_figures, send_evaluated
from tasks.tracking.live import CURVES
from tasks.tracking.runs import (
    LINEAGE,
    TRAINING_MODE,
    answering,
    commit_text,
    connect,
    dataset_digests,
    experiment_address,
    flow_run_link,
    flow_run_tag,
    lineage_text,
    read_tracking_run,
    results_address,
    run_address,
    run_page,
    trained_on_commit,
    version_address,
)
from tasks.tracking.sending import send_rest
from tasks.tracking.traces import send_rest_of_rollouts
from tasks.tracking.view import RESULT, SWEEP

PLAN_TAGS = ("num_prompts", "max_steps", "completions")
DESCRIPTION = 4000  # characters, of 5,000 that MLflow's database has for it: a link to the traces is added
CHARTS = "^(reward$|rewards/|eval_|entropy$|kl$|completions/mean_length$)"  # the charts to look at first


@task(name="register")
def register(run: Path, config: RunConfig, force: bool = False) -> State[None]:
    return run_stage(REGISTER, run, config, _work, force or _is_deleted(run))


def _is_deleted(run: Path) -> bool:
    """True if MLflow no longer has the version that the run has registered. False if MLflow does not say."""
    registered = REGISTER.read_receipt(run)
    if not registered:
        return False
    name, version = registered["model_name"], registered["version"]
    try:
        with answering():
            deleted = find_version(connect(), name, version) is None
    except TrackingError as error:
        get_run_logger().warning("whether %s version %s is still there is unknown: %s", name, version, error)
        return False
    if deleted:
        get_run_logger().info("%s version %s was deleted in MLflow: it is registered again", name, version)
    return deleted


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
    send_rest_of_rollouts(tracked, training, config, log)
    metric = figures.metric_of(config, report)
    verdict, commit = describe(report, metric), trained_on_commit(client, run_id)
    # Logged again, since the evaluation's keys may have been edited since the training.
    client.log_text(run_id, lineage_text(config), LINEAGE)
    client.set_tag(run_id, MLFLOW_RUN_NOTE, _note(run, verdict))
    client.set_tag(run_id, RESULT, result_line(report, metric))
    for tag, value in flow_run_tag().items():
        client.set_tag(run_id, tag, value)
    results = (training / run_files.RESULT, training / run_files.METRICS)
    for path in (run / run_files.CONFIG, PLAN.path(run), *results):
        client.log_artifact(run_id, str(path))
    if (curves := training / CURVES).exists():
        client.log_artifact(run_id, str(curves), "training")
    evaluation = EVALUATE.path(run)
    for file in (path for path in evaluation.rglob("*") if path.is_file()):
        # One by one, which replaces files: `log_artifacts` would set times, which only a file's owner may.
        client.log_artifact(run_id, str(file), str(run_files.EVALUATION / file.relative_to(evaluation).parent))
    costs = run_cost(run, config)
    cost = {name.replace("/", "."): f"{value:.6g}" for name, value in costs.metrics.items()}
    tags = {
        **_tags(config, run, report),
        **cost,
        **commit,
        RECORD: keep_record(client, run_id, run, keys[REGISTER.name]),
    }
    scratch = context.partial.with_name("model.partial")
    description = f"{verdict}\n\n{origin(config.name, commit, dataset_digests(run))}"[:DESCRIPTION]
    made = _made_before(client, name, tags[RECORD], run_id, run)
    number, model_id = made or log_version(
        run_id,
        training,
        scratch,
        name,
        _answering(config, run),
        _example(run),
        tags,
        description,
        lambda version: ask_version(config, run, version, costs.gpu_hours is not None, log),
    )
    _log_evaluation(client, context, tracked, report, model_id)
    if traced := _trace_evaluation(context, tracked, report, model_id, number):
        client.update_model_version(name, number, f"{description}\n\n{traced}")
    client.set_registered_model_alias(name, config.registry.alias, number)
    client.set_terminated(run_id)
    log.info("registered %s version %s, alias %s", name, number, config.registry.alias)
    policies = report["sets"][HELD_OUT]["policies"]
    base, trained = (figures.amount(metric, policies[policy][metric]["mean"]) for policy in ("base", "trained"))
    show_markdown(
        "registration",
        f"# {escape(name)} version {number}\n\nAlias {escape(config.registry.alias)}. "
        f"{escape(f'Held-out {metric} {trained}, of the base model {base}.')}\n\n[Version {number} in MLflow]"
        f"({version_address(name, number)}), of the MLflow run {run_page(training)}\n",
        escape(f"{name} version {number}, alias {config.registry.alias}"),
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


def _made_before(client: MlflowClient, name: str, record: str, run_id: str, run: Path) -> tuple[str, str] | None:
    """Number and logged model of the version that an interrupted attempt has made of the same outputs: one with the
    same record that is newer than the run's receipt."""
    known = REGISTER.read_receipt(run)
    registered = int(known["version"]) if known.get("model_name") == name else 0
    for version in client.search_model_versions(f"run_id = '{run_id}'"):
        is_newer = version.name == name and int(version.version) > registered
        if is_newer and version.tags.get(RECORD) == record:
            return str(version.version), str(version.source).removeprefix("models:/")
    return None


def _log_evaluation(
    client: MlflowClient, context: Context, tracked: Mapping[str, Any], report: Mapping[str, Any], model_id: str
) -> None:
    """Log the evaluation's figures to the version's logged model, and those of the updates that were evaluated while
    the training ran to logged models of their own."""
    training, config = TRAIN.path(context.run), context.config
    digests = dataset_digests(context.run)
    files = dict.fromkeys(config.evaluated_sources, config.evaluation_files[HELD_OUT]) | config.evaluation_files
    data = {name: (file, digests[file]) for name, file in files.items()}
    rows = [json.loads(line) for line in (training / run_files.METRICS).read_text().splitlines()]
    result = TRAIN.read_receipt(context.run)
    chosen = result["best_step"] if config.train.load_best_model_at_end else None
    updates = chosen or result["counted"]["updates"]
    log_checkpoints(client, tracked["experiment_id"], tracked["run_id"], rows, data[HELD_OUT])
    log_figures(client, tracked["run_id"], model_id, report, data, updates)
    metrics, now = run_cost(context.run, config).metrics | _warm_start_losses(context), round(1000 * time.time())
    of_model = [Metric(name, value, now, updates, model_id) for name, value in metrics.items()]
    client.log_batch(tracked["run_id"], of_model)


def _warm_start_losses(context: Context) -> dict[str, float]:
    """Loss per token in the first and in the last update of the warm start; empty without one."""
    if not context.config.warm_start.is_used:
        return {}
    lines = (WARM_START.path(context.run) / run_files.METRICS).read_text().splitlines()
    ends = {"warm_start/first_loss": lines[0], "warm_start/last_loss": lines[-1]}
    return {name: json.loads(line)["loss"] for name, line in ends.items()}


def _trace_evaluation(
    context: Context, tracked: Mapping[str, Any], report: Mapping[str, Any], model_id: str, number: str
) -> str:
    """Send answers of the evaluation as traces of the version's logged model; returns links to them as Markdown."""
    if not context.config.registry.evaluation_traces:
        return ""
    samples = EVALUATE.path(context.run) / run_files.SAMPLES
    try:
        counts = send_evaluated(samples, report, context.config, tracked, model_id, number)
    except Exception as error:  # a version must not be lost because of its traces
        get_run_logger().warning("MLflow does not take the evaluation as traces: %s", first_cause(error))
        return ""
    traces = f"{experiment_address(tracked)}/models/{model_id}/traces{TRAINING_MODE}"
    found = " and ".join(
        f"{of_one['worse']:,} worse and {of_one['better']:,} better than the {other}"
        for other, of_one in counts.items()
    )
    tags = " or ".join(f"`vs_{other}`" for other in counts)
    return f"Of the held-out prompts, it answers {found}: [read them]({traces}), filtered by the tag {tags}."


def describe(report: dict[str, Any], metric: str) -> str:
    """Describe the result of an evaluation as Markdown: a sentence, and the figures below it."""
    verdict = headline(report, metric)
    return f"**{verdict.headline}.**\n\n{verdict.sentence}".strip()


def result_line(report: Mapping[str, Any], metric: str) -> str:
    """Format the trained policy's figure on the held-out prompts and its gain over the base, with intervals: `accuracy
    79.6% [75.8, 82.9], +36.0 points [30.6, 41.2]`."""
    found = report["sets"][HELD_OUT]
    own, gain = found["policies"]["trained"][metric], found["differences"]["base"][metric]
    return (
        f"{metric} {figures.amount(metric, own['mean'])} {figures.interval(metric, own)}, "
        f"{figures.gain(metric, gain)} {figures.interval(metric, gain)}"
    )


def origin(run: str, commit: Mapping[str, str], data: Mapping[str, str]) -> str:
    """Describe the run, code and data that made a version, as Markdown."""
    code = f" at commit {commit_text(commit)}" if commit else ""
    digests = ", ".join(f"{name} {digest}" for name, digest in data.items())
    return f"Trained by run `{run}`{code}, on validated data {digests}."


def _note(run: Path, verdict: str) -> str:
    """Description of the training's MLflow run, as Markdown."""
    report = EVALUATE.path(run) / PAGE
    page = f"{run_address(TRAIN.path(run), f'artifacts/{report.parent.name}/{PAGE}')}"
    return (
        f"{verdict}\n\nOn one page: [{PAGE}]({page}) under Artifacts (`{report}`). [All runs with their results]"
        f"({results_address(read_tracking_run(TRAIN.path(run)))}). Charts to begin with: Model metrics, search "
        f"`{CHARTS}`. {flow_run_link()}"
    )


def keep_record(client: MlflowClient, run_id: str, run: Path, key: str) -> str:
    """Log the files that a version is judged by to a folder of its own in the MLflow run, which all versions of a
    training share; returns the folder. `key`: lineage key of the registration."""
    record = f"registered/{hash_values(key, EVALUATE.read_receipt(run).get('made'))[:12]}"
    for path in RECORDED:
        client.log_artifact(run_id, str(run / path), str(Path(record, path).parent))
    return record


def _example(run: Path) -> Example:
    """The first held-out prompt, and the trained policy's completion."""
    samples = read_parquet(EVALUATE.path(run) / run_files.SAMPLES).filter(set=HELD_OUT)
    prompt = samples["prompt"][0]
    return Example(without_gaps(prompt) if is_conversation(prompt) else prompt, samples["trained/completion"][0])


def _answering(config: RunConfig, run: Path) -> Answering:
    """How a version of the run answers."""
    prompt = _example(run).prompt
    setting = make_setting(config, load_tokenizer(config.model)) if config.environment.is_used else None
    if setting is None:
        images = beside(run_files.prompts(run, config.evaluation_files[HELD_OUT])) is not None
        return answering_of(config, conversational=is_conversation(prompt), tools=None, images=images)
    setting.environments.close()
    names = [*config.environment.factories]
    tools = setting.options(names[0] if len(names) == 1 else "")["tools"]
    return answering_of(config, conversational=True, tools=tools)


def _tags(config: RunConfig, run: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Tags of the model version: its run, its sweep and its figures."""
    plan, metric = PLAN.read_receipt(run)["plan"], figures.metric_of(config, report)
    return {
        "run": config.name,
        **prompts_tags(read_parquet(EVALUATE.path(run) / run_files.SAMPLES)),
        **({SWEEP: config.registry.sweep} if config.registry.sweep else {}),
        **{
            f"evaluation.{name}.{policy}.{metric}": f"{of_policy[metric]['mean']:.4f}"
            for name, found in report["sets"].items()
            for policy, of_policy in found["policies"].items()
        },
        **{f"plan.{key}": plan[key] for key in PLAN_TAGS},
    }
