"""The traces that an MLflow server has of a run, held against what the run recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlflow
from mlflow.entities import Trace

from grpo_core.config.files import load_config
from grpo_core.system.tables import read_parquet
from tasks.rendering.visible import shortened

MOST = 1000


def traces_of(tracked: dict[str, Any], filter: str = "") -> list[Trace]:
    """The traces of an MLflow run, as its RUN_FILE describes it."""
    found = mlflow.search_traces(
        locations=[tracked["experiment_id"]],
        run_id=tracked["run_id"],
        filter_string=filter or None,
        max_results=MOST,
        return_type="list",
    )
    return sorted(found, key=lambda trace: trace.info.trace_id)


def assert_traced(run: Path, versions: int = 1) -> None:
    """Rollouts of each generation batch are there, `registry.traces_per_batch` of each, and all answers of the
    evaluation for each version; everything once, with its span, and with what was recorded of it."""
    config = load_config(run / "config.toml")
    tracked = json.loads((run / "training" / "mlflow.json").read_text())
    rewards = [reward.name for reward in config.rewards]
    files = sorted((run / "training" / "completions").glob("*.parquet"))
    recorded = {}
    for file in files:
        for row in read_parquet(file).to_dicts():
            recorded[(str(int(file.stem.partition("-")[2])), str(row["row"]), shortened(row["completion"]))] = row
    rollouts = traces_of(tracked, "tags.kind = 'rollout'")
    batches = [trace.info.tags["batch"] for trace in rollouts]
    assert {it: batches.count(it) for it in batches} == {
        str(int(file.stem.partition("-")[2])): config.registry.traces_per_batch for file in files
    }
    for trace in rollouts:
        [span] = trace.data.spans
        [said] = span.outputs["messages"]
        row = recorded[trace.info.tags["batch"], trace.info.tags["row"], said["content"].replace("!\\[", "![")]
        assert trace.info.tags["tokens"] == str(row["completion_tokens"])
        assert [(it.name, it.value) for it in trace.info.assessments] == [(it, row[f"rewards/{it}"]) for it in rewards]
    samples = read_parquet(run / "evaluation" / "samples.parquet")
    answers = [trace for trace in traces_of(tracked) if trace.info.tags["kind"] != "rollout"]
    assert len(answers) == versions * samples.height
    said = [trace.data.spans[0].outputs["messages"][0]["content"].replace("!\\[", "![") for trace in answers]
    assert {*said} == {shortened(text) for text in samples["trained/completion"]}
