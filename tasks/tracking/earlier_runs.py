"""The pace of earlier runs in MLflow, by which a plan tells its wall time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from mlflow.entities import Run

from grpo_core.config.run import RunConfig
from grpo_core.planning.pace import Throughput
from tasks.tracking.runs import HARDWARE, answering, connect, parameters

EARLIER_RUNS = 5


@answering()
def earlier_throughput(config: RunConfig, hardware: str) -> Throughput | None:
    """Median pace of the last finished runs of the same base model on `hardware` (part of its name; "" for any); None
    if there are none. Raises TrackingError if MLflow does not answer."""
    client = connect()
    experiment = client.get_experiment_by_name(config.registry.experiment)
    if experiment is None:
        return None
    model, where = (text.replace("'", "") for text in (config.model.name_or_path, hardware))
    runs = client.search_runs(
        [experiment.experiment_id],
        f"params.`model.name_or_path` = '{model}' and attributes.status = 'FINISHED' "
        f"and tags.{HARDWARE} ILIKE '%{where}%'",
        order_by=["attributes.start_time DESC"],
        max_results=EARLIER_RUNS,
    )
    paces, lengths, turns, names, others, sampled = [], [], [], [], [], []
    for run in runs:
        if _sampling(run.data.params) != _sampling(parameters(config)):
            continue
        history = client.get_metric_history(run.info.run_id, "step_time")
        seconds = sum(metric.value for metric in history)
        tokens = run.data.metrics.get("num_tokens")
        if seconds and tokens:
            paces.append(tokens / seconds / int(run.data.params["train.num_processes"]))
            own = 1 - run.data.metrics.get("conversations/environment_share", 0.0)
            lengths.append(run.data.metrics["completions/mean_length"] / own)
            turns.append(run.data.metrics.get("conversations/mean_turns", 0.0))
            names.append(run.data.tags[HARDWARE])
            whole = (max(metric.timestamp for metric in history) - run.info.start_time) / 1000
            others.append(max(whole - seconds, 0.0))
            sampled += _sample_seconds(run)
    if not paces:
        return None
    return Throughput(
        statistics.median(paces),
        statistics.median(lengths),
        f"median of {len(paces)} earlier runs of this model in MLflow, on {', '.join(dict.fromkeys(names))}: "
        f"{statistics.median(paces):,.0f} tokens/s per process, {_length(lengths, turns)} at their end, "
        f"{statistics.median(others):,.0f} s of a training outside its updates",
        statistics.median(others),
        statistics.median(sampled) if sampled else None,
    )


def _sample_seconds(run: Run) -> list[float]:
    """Seconds that each process needed to sample and score a completion at the run's end; empty if its times do not
    show this, because samples were taken ahead or groups replaced."""
    params, metrics = run.data.params, run.data.metrics
    if params.get("rollout.max_staleness") != "0" or params.get("rollout.dynamic_sample") != "False":
        return []
    try:
        seconds, batch = metrics["time/generate"] + metrics["time/score"], int(params["plan.generation_batch_size"])
    except KeyError:
        return []
    return [seconds * int(params["train.num_processes"]) / batch]


def _sampling(params: Mapping[str, str]) -> tuple[bool, dict[str, str]]:
    """Return whether completions are sampled rather than taken from a recording, and the parameters that name
    environments and tools."""
    names = ("environment.environment_factory", "environment.tools.")
    acting = {key: value for key, value in params.items() if key.startswith(names)}
    return params.get("rollout.engine") == "recorded", acting


def _length(lengths: Sequence[float], turns: Sequence[float]) -> str:
    mean = f"{statistics.median(lengths):.0f} tokens"
    if not any(turns):
        return f"completions of {mean}"
    return f"conversations of {statistics.median(turns):.1f} turns and {mean}, waiting for environments included,"
