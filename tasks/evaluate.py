"""Stage 4, evaluate: base and trained policy side by side, in a supervised process of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.client.schemas.objects import State

from tasks.process import run_process
from tasks.stage import EVALUATE, TRAIN, Context, run_stage
from tasks.tracking import connect, training_run_id

SAMPLES_SHOWN = 20


@task(name="evaluate")
def evaluate(run: Path, force: bool = False) -> State[None]:
    return run_stage(EVALUATE, run, _work, force)


def _work(context: Context) -> dict[str, Any]:
    log = get_run_logger()
    run_process(["-m", "grpo_core.evaluate", str(context.run), "--output", str(context.partial)], log.info)
    report = json.loads((context.partial / "report.json").read_text())
    client, run_id = connect(), training_run_id(TRAIN.path(context.run))
    for policy in ("base", "trained"):
        for name, value in report[policy].items():
            client.log_metric(run_id, f"eval/{policy}/{name}", value)
    for name, difference in report["difference"].items():
        for bound in ("mean", "low", "high"):
            client.log_metric(run_id, f"eval/difference/{name}/{bound}", difference[bound])
    accuracy = f"Held-out accuracy {report['base']['accuracy']:.1%} → {report['trained']['accuracy']:.1%}"
    create_markdown_artifact(key="evaluation", markdown=_markdown(report), description=accuracy)
    samples = pl.read_parquet(context.partial / "samples.parquet", n_rows=SAMPLES_SHOWN)
    create_table_artifact(
        key="evaluation-samples",
        table=json.loads(_side_by_side(samples).write_json()),
        description=f"The first {samples.height} held-out prompts, as base and trained policy complete them",
    )
    return report


def _side_by_side(samples: pl.DataFrame) -> pl.DataFrame:
    """What base and trained policy have of the same, in neighbouring columns."""
    figures = [column.removeprefix("base/") for column in samples.columns if column.startswith("base/")]
    pairs = [f"{policy}/{figure}" for figure in figures for policy in ("base", "trained")]
    return samples.select(pl.exclude(pairs), *pairs)


def _markdown(report: dict[str, Any]) -> str:
    def row(name: str, form: str) -> str:
        difference = report["difference"][name]
        return (
            f"| {name} | {report['base'][name]:{form}} | {report['trained'][name]:{form}} "
            f"| {difference['mean']:+{form}} [{difference['low']:+{form}}, {difference['high']:+{form}}] |"
        )

    return (
        f"# Evaluation on {report['num_prompts']} held-out prompts\n\n"
        f"| | base | trained | difference [{report['difference']['accuracy']['confidence']:.0%} interval] |\n"
        f"|---|---|---|---|\n{row('accuracy', '.1%')}\n{row('reward', '.3f')}\n"
    )
