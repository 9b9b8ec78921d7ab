"""The stage evaluate: base model, present champion and trained policy side by side, in a supervised process."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import polars as pl
from prefect import get_run_logger, task
from prefect.client.schemas.objects import State

from grpo_core import run_files
from grpo_core.config.evaluation import CHAMPION, HELD_OUT
from grpo_core.config.metrics import DECIDING
from grpo_core.config.run import RunConfig
from grpo_core.data.chat import turns
from grpo_core.data.images import in_words
from grpo_core.system.tables import read_parquet
from tasks.processes.launch import launch_with_restarts
from tasks.processes.training_machine import check_training_machine
from tasks.processes.vllm_servers import gpus_and_servers
from tasks.registry.champion import present_champion
from tasks.registry.judging import identity
from tasks.rendering import figures as as_text
from tasks.rendering.markdown import escape, table
from tasks.reports.report import PAGE, headline, rows_of, verdicts, write_report
from tasks.stages.arms import other_arms
from tasks.stages.dependencies import Parts, hash_values
from tasks.stages.files import remove
from tasks.stages.lineage import lineage_keys
from tasks.stages.run import Context, run_stage
from tasks.stages.table import EVALUATE, TRAIN
from tasks.tracking.artifacts import show_markdown, show_table
from tasks.tracking.runs import (
    answering,
    commit_text,
    connect,
    read_tracking_run,
    run_address,
    run_page,
    trained_on_commit,
)

SAMPLES_SHOWN = 20


@task(name="evaluate")
def evaluate(run: Path, config: RunConfig, force: bool = False) -> State[None]:
    state = run_stage(EVALUATE, run, config, _work, force)
    if state.is_completed():
        report = EVALUATE.read_receipt(run)
        state.message = headline(report, as_text.metric_of(config, report)).headline
    return state


def _work(context: Context) -> dict[str, Any]:
    config, log, start = context.config, get_run_logger(), time.monotonic()
    check_training_machine(context.config)
    place = replace(context, config=config.where_evaluated)
    client = connect()
    command = ["-m", "grpo_core.evaluate", str(context.run), "--output", str(context.partial)]
    with answering():  # fails now rather than after the work
        champion = present_champion(client, config.registry.model_name or config.name)
    answers = hash_values(Parts(config).base_answers)
    earlier, known = _answers_of_another_arm(context, answers, identity(champion) if champion else None)
    if earlier:
        command += ["--earlier", str(earlier), "--known", *known]
        log.info("the answers of %s are those of %s, taken over", " and ".join(known), earlier.parents[1].name)
    with gpus_and_servers(place, log) as addresses:
        if champion is None or CHAMPION in known:
            launch_with_restarts(place.config, command, log, context.partial, addresses)
        else:
            log.info("the present champion is %s version %s", champion.name, champion.version)
            (folder := context.partial / "champion").mkdir()
            try:
                uri = f"models:/{champion.name}/{champion.version}/model"
                model = mlflow.artifacts.download_artifacts(uri, dst_path=str(folder))
                command += ["--champion", model]
                launch_with_restarts(place.config, command, log, context.partial, addresses)
            finally:
                remove(folder)
    report = json.loads((context.partial / EVALUATE.receipt).read_text()) | {"base_answers": answers}
    if champion is not None and CHAMPION in report["policies"]:
        report["champion"] = identity(champion)
    run_id = read_tracking_run(TRAIN.path(context.run))["run_id"]
    metric = as_text.metric_of(config, report)
    links = f"On one page: `{EVALUATE.path(context.run) / PAGE}`. MLflow run: {run_page(TRAIN.path(context.run))}"
    show_markdown("evaluation", f"{_markdown(report, metric)}\n{links}\n", escape("; ".join(verdicts(report, metric))))
    samples = read_parquet(context.partial / run_files.SAMPLES)
    first = samples.filter((pl.col("set") == HELD_OUT) & (pl.col("sample") == 0)).head(SAMPLES_SHOWN)
    rows = json.loads(_with_policies_side_by_side(first, report["policies"]).write_json())
    show_table(
        "evaluation-samples",
        [{key: _cell(key, value) for key, value in row.items()} for row in rows],
        f"The first {first.height} held-out prompts, as {', '.join(report['policies'])} complete them",
    )
    address, keys = run_address(TRAIN.path(context.run)), lineage_keys(config)
    commit = commit_text(trained_on_commit(client, run_id))
    try:
        write_report(context.run, config, context.partial, report, time.monotonic() - start, keys, address, commit)
    except Exception as error:  # an evaluation must not be lost because its page failed
        log.warning("%s could not be made: %r", PAGE, error, exc_info=True)
    return report


def _answers_of_another_arm(
    context: Context, answers: str, champion: dict[str, Any] | None
) -> tuple[Path | None, list[str]]:
    """Return samples.parquet of another arm of the sweep that holds the same answers of the base model, and the
    policies whose answers can be reused: the champion's too, if it was the same. `answers`: hash of
    `Parts.base_answers`."""
    found: tuple[Path | None, list[str]] = (None, [])
    for other in () if context.force else other_arms(context.run, context.config):
        report, samples = EVALUATE.read_receipt(other), EVALUATE.path(other) / run_files.SAMPLES
        if report.get("base_answers") != answers or not samples.is_file():
            continue
        if champion is None or report.get("champion") == champion:
            return samples, ["base", *([CHAMPION] if champion else [])]
        found = samples, ["base"]
    return found


def _with_policies_side_by_side(samples: pl.DataFrame, policies: list[str]) -> pl.DataFrame:
    """Reorder the columns so that the same figure of each policy is side by side."""
    figures = [column.removeprefix("trained/") for column in samples.columns if column.startswith("trained/")]
    pairs = [f"{policy}/{figure}" for figure in figures for policy in policies]
    return samples.select(pl.exclude(pairs, "set", "sample"), *(pair for pair in pairs if pair in samples.columns))


def _cell(column: str, value: Any) -> Any:
    """Convert a value of samples.parquet for a table artifact; a conversation becomes text, and so does an image."""
    if column == "prompt":
        value = in_words(value)
    if column.endswith("/conversation"):
        value = "\n".join(f"{role}: {text}" for role, text in turns(json.loads(value)))
    return _escaped(value)


def _escaped(value: Any) -> Any:
    """Escape a value for a table artifact, whose cells Prefect's page renders as Markdown."""
    if isinstance(value, str | list | dict):
        return escape((value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).strip())
    return value


def _markdown(report: Mapping[str, Any], metric: str) -> str:
    parts = ["# Evaluation", *(f"**{escape(sentence)}.**" for sentence in verdicts(report, metric))]
    for name, figures in report["sets"].items():
        parts += [f"## {escape(name)}: {as_text.counts(figures)}", table(rows_of(figures))]
        parts.append(table(_difference_rows(figures)))
        if categories := figures.get("categories"):
            parts.append(table(_category_rows(categories, metric)))
    return "\n\n".join(parts) + "\n"


def _difference_rows(figures: Mapping[str, Any]) -> Iterator[list[str]]:
    yield ["trained against", "metric", "p", "probability better", "minimum detectable difference"]
    for other, differences in figures["differences"].items():
        for metric in DECIDING:
            found = differences[metric]
            chance = (as_text.p_value(found["p_value"]), as_text.probability(found["probability_better"]))
            yield [other, metric, *chance, as_text.detectable(metric, found)]


def _category_rows(categories: Mapping[str, Any], metric: str) -> Iterator[list[str]]:
    for number, (category, figures) in enumerate(categories.items()):
        head, *rows = rows_of(figures)
        if number == 0:
            yield ["category", as_text.unit(figures), *(f"{metric}, {column}" for column in head[1:])]
        [values] = (values for name, *values in rows if name == metric)
        yield [category, f"{figures[f'num_{as_text.unit(figures)}']:,}", *values]
