"""Logs an evaluation to a logged model in MLflow: figures by data set, and answers as traces."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelOutput, Metric

from grpo_core import run_files
from grpo_core.config.evaluation import HELD_OUT
from grpo_core.config.metrics import DECIDING
from grpo_core.config.run import RunConfig
from grpo_core.data.images import beside
from grpo_core.evaluation.outcomes import outcomes
from grpo_core.system.tables import read_parquet
from tasks.rendering import figures
from tasks.tracking.sending import METRICS_PER_REQUEST
from tasks.tracking.traces import Told, messages_of, send, thumbnails

STANDINGS = ("worse", "better", "same", "not scored")  # prompts are chosen in this order
NOT_KEPT = "not kept; the figures of the policy at this update"


def log_figures(
    client: MlflowClient,
    run_id: str,
    model_id: str,
    report: Mapping[str, Any],
    data: Mapping[str, tuple[str, str]],
    step: int,
) -> None:
    """Log eval/SET/POLICY/METRIC, with the interval of the metric by which policies are compared, and
    eval/SET/difference/POLICY/METRIC/… for the trained policy minus each other.

    Figures of the trained policy are also logged to its logged model, with the data set. data: name and hash of the
    prompts of each set; step: number of updates that made the policy.
    """
    metrics, now = [], round(1000 * time.time())

    def metric(name: str, value: float, of_model: bool, dataset: tuple[str, str]) -> Metric:
        key = name.replace("@", "_at_")  # MLflow allows no @ in a name
        if not of_model:
            return Metric(key, value, now, step)
        return Metric(key, value, now, step, model_id, *dataset, run_id)

    for name, found in report["sets"].items():
        for policy, of_policy in found["policies"].items():
            values = {key: it["mean"] for key, it in of_policy.items()}
            for key in DECIDING if policy == "trained" else ():
                values |= {f"{key}/{bound}": of_policy[key][bound] for bound in ("low", "high")}
            prefix, own = f"eval/{name}/{policy}", policy == "trained"
            metrics += [metric(f"{prefix}/{key}", value, own, data[name]) for key, value in values.items()]
        for other, differences in found["differences"].items():
            for key, it in differences.items():
                prefix = f"eval/{name}/difference/{other}/{key}"
                parts = ("mean", "low", "high", "p_value")
                metrics += [metric(f"{prefix}/{part}", it[part], True, data[name]) for part in parts]
    finite = [it for it in metrics if math.isfinite(it.value)]
    for first in range(0, len(finite), METRICS_PER_REQUEST):
        client.log_batch(run_id, finite[first : first + METRICS_PER_REQUEST])


def log_checkpoints(
    client: MlflowClient,
    experiment_id: str,
    run_id: str,
    rows: Sequence[Mapping[str, float]],
    data: tuple[str, str],
) -> None:
    """Make a logged model of each update after which the training evaluated its policy, with these figures. One that
    has figures already is left as it is. rows: of metrics.jsonl; data: name and hash of the held-out prompts."""
    known = sorted(_models_of(client, experiment_id, run_id), key=lambda model: bool(model.metrics))
    there = {model.name: model for model in known}
    outputs = client.get_run(run_id).outputs
    linked = {it.model_id for it in outputs.model_outputs} if outputs else set()
    for row in rows:
        held_out = {name: value for name, value in row.items() if name.startswith("eval_")}
        step, name = int(row["step"]), f"checkpoint-{int(row['step']):06d}"
        model = there.get(name)  # without figures: made by a process that was killed before it had logged them
        if not held_out or (model and model.metrics):
            continue
        tags = {"weights": NOT_KEPT, "step": str(step)}
        model = model or client.create_logged_model(experiment_id, name, run_id, tags=tags)
        milliseconds = round(1000 * row["timestamp"])
        dataset, digest = data
        metrics = [
            Metric(key, value, milliseconds, step, model.model_id, dataset, digest, run_id)
            for key, value in held_out.items()
        ]
        client.finalize_logged_model(model.model_id, "READY")
        if model.model_id not in linked:
            client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=step)])
        client.log_batch(run_id, metrics)


def _models_of(client: MlflowClient, experiment_id: str, run_id: str) -> Iterator[LoggedModel]:
    """The logged models of a run."""
    token: str | None = None
    while True:
        found = client.search_logged_models([experiment_id], f"source_run_id = '{run_id}'", page_token=token)
        yield from found
        if not (token := found.token):
            return


def send_evaluated(
    samples_file: Path,
    report: Mapping[str, Any],
    config: RunConfig,
    tracked: Mapping[str, Any],
    model_id: str,
    version: str,
) -> dict[str, dict[str, int]]:
    """Send the trained policy's answers as traces of its logged model, up to registry.evaluation_traces per set;
    returns, for each other policy, the number of held-out prompts that the trained one answers worse, better, …
    (STANDINGS).

    Tags `vs_base` and `vs_champion` contain the policy's standing on the prompt, by the metric that decides.
    """
    samples, evaluated = read_parquet(samples_file), samples_file.stat().st_mtime_ns // 1_000_000
    images = beside(run_files.prompts(samples_file.parents[1], "eval"))
    told, counts = [], dict[str, dict[str, int]]()
    for name in report["sets"]:
        if name in config.evaluated_sources:  # its prompts are part of the held-out ones
            continue
        of_set = samples.filter(pl.col("set") == name)
        rows = of_set.filter(pl.col("sample") == 0).sort("row").to_dicts()
        standings = standings_of(of_set, name, report, config)
        if name == HELD_OUT:
            counts = {other: {kind: found.count(kind) for kind in STANDINGS} for other, found in standings.items()}
        worst = sorted(
            range(len(rows)), key=lambda place: (min(STANDINGS.index(it[place]) for it in standings.values()), place)
        )
        for rank, place in enumerate(worst[: config.registry.evaluation_traces]):
            at = evaluated - rank  # MLflow's table shows the newest first: here the worse answers
            against = {f"vs_{other}": found[place] for other, found in standings.items()}
            one = _answer(rows[place], name, report, config, tracked["run_id"], model_id, version, against, at)
            told.append(replace(one, images=thumbnails(rows[place], images)))
    send(told, tracked["experiment_id"])
    return counts


def standings_of(of_set: pl.DataFrame, name: str, report: Mapping[str, Any], config: RunConfig) -> dict[str, list[str]]:
    """Standing of the trained policy against each other policy, one of STANDINGS for each row of a set, in order."""
    metric = figures.metric_of(config, report)
    values = {
        policy: outcomes(of_set, name, policy, metric, config.rewards, report["accuracy_reward"])
        for policy in report["policies"]
    }
    return {
        other: [_standing(mine, theirs) for mine, theirs in zip(values["trained"], values[other], strict=True)]
        for other in report["policies"]
        if other != "trained"
    }


def _standing(mine: float, theirs: float) -> str:
    if math.isnan(mine) or math.isnan(theirs):
        return "not scored"
    return "same" if mine == theirs else "better" if mine > theirs else "worse"


def _answer(
    row: Mapping[str, Any],
    name: str,
    report: Mapping[str, Any],
    config: RunConfig,
    run_id: str,
    model_id: str,
    version: str,
    against: Mapping[str, str],
    time: int,
) -> Told:
    said = {
        policy: messages_of(row.get(f"{policy}/conversation"), row[f"{policy}/completion"])
        for policy in report["policies"]
    }
    champion = (report.get("champion") or {}).get("version")
    return Told(
        name=f"{name}, prompt {row['row']}",
        identity=[run_id, model_id, name, row["row"], row["trained/completion"], row.get("trained/conversation")],
        prompt=row["prompt"],
        messages=said["trained"],
        others={policy: messages for policy, messages in said.items() if policy != "trained"},
        expected=row.get("answer"),
        tokens=(None, row["trained/completion_tokens"]),
        rewards={it.name: row[f"trained/rewards/{it.name}"] for it in config.rewards},
        tags={
            "kind": "evaluation",
            "run": config.name,
            "set": name,
            "row": row["row"],
            "version": version,
            **against,
            **({"champion": champion} if champion else {}),
            **({"category": row["category"]} if row.get("category") is not None else {}),
            "tokens": row["trained/completion_tokens"],
            "truncated": str(row["trained/truncated"]).lower(),
        },
        time=time,
        run_id=run_id,
        model_id=model_id,
    )
