"""report.html: what a run did and whether it helped, on one page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from grpo_core.comparison import verdict
from grpo_core.evaluation_sections import HELD_OUT
from grpo_core.outcomes import outcomes
from grpo_core.statistics import POWER
from tasks import account, drawing, figures
from tasks.drawing import BLUE, GREY, ORANGE
from tasks.page import Chart, Section, Table, Tile, Verdict, render
from tasks.record import Record, read_record
from tasks.storage import write_text

PAGE = "report.html"
POLICY_COLOURS = {"base": GREY, "champion": ORANGE, "trained": BLUE}
SHOWN = {"better": 4, "worse": 3, "still wrong": 2, "still right": 1}  # prompts of each kind
LONGEST_TEXT = 3000  # characters of a prompt or completion


def write_report(
    run: Path,
    folder: Path,
    evaluation: Mapping[str, Any],
    seconds: float,
    keys: Mapping[str, str],
    mlflow_run: str,
) -> None:
    """report.html of a run into `folder`, which has samples.parquet, beside the `evaluation` that was made in it."""
    record = read_record(run, evaluation=folder)
    write_text(folder / PAGE, report_page(replace(record, evaluation=evaluation), seconds, keys, mlflow_run))


def report_page(record: Record, seconds: float, keys: Mapping[str, str], mlflow_run: str) -> str:
    """The page. `seconds`: of the evaluation. `keys`: lineage keys by stage. `mlflow_run`: its address."""
    sections = [
        _evaluation(record),
        account.curves(record),
        _before_and_after(record),
        account.plan_and_outcome(record),
        account.time_spent(record, seconds),
        account.data_section(record),
        account.configuration(record, keys),
    ]
    made = f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}"
    return render(
        record.config.name,
        f"{record.config.model.name_or_path} · {made}",
        [headline(record.evaluation)],
        sections,
        _tiles(record.evaluation),
        {"MLflow run": mlflow_run},
    )


def headline(evaluation: Mapping[str, Any]) -> Verdict:
    """Whether the trained policy is better than the champion, or where there is none than the base: with its figures,
    by accuracy on the held-out prompts."""
    found, rival = evaluation["sets"][HELD_OUT], _rival(evaluation)
    gain = found["differences"][rival]["accuracy"]
    sentence = verdict(gain, _title(evaluation, rival))
    right = (found["policies"][policy]["accuracy"]["mean"] for policy in evaluation["policies"])
    steps = (f"{figures.percent(mean)} ({policy})" for policy, mean in zip(evaluation["policies"], right, strict=True))
    return Verdict(
        figures.tone(gain),
        f"{sentence[0].upper()}{sentence[1:]}",
        f"{' → '.join(steps)} right on {gain['num_prompts']:,} held-out prompts. {figures.gain('accuracy', gain)} over "
        f"the {rival}, {gain['confidence']:.0%} interval {100 * gain['low']:+.1f} to {100 * gain['high']:+.1f}, "
        f"probability of being better {figures.probability(gain['probability_better'])}. On so many prompts, "
        f"{figures.detectable('accuracy', gain)} is the smallest true gain that shows {POWER:.0%} of the time.",
    )


def _rival(evaluation: Mapping[str, Any]) -> str:
    return "champion" if evaluation["champion"] else "base"


def _title(evaluation: Mapping[str, Any], policy: str) -> str:
    return f"champion (version {evaluation['champion']['version']})" if policy == "champion" else policy


def _tiles(evaluation: Mapping[str, Any]) -> list[Tile]:
    found, rival = evaluation["sets"][HELD_OUT], _rival(evaluation)
    accuracy = {policy: found["policies"][policy]["accuracy"] for policy in evaluation["policies"]}
    gain = found["differences"][rival]["accuracy"]
    return [
        *(
            Tile(_title(evaluation, policy), figures.percent(it["mean"]), figures.interval("accuracy", it), policy)
            for policy, it in accuracy.items()
        ),
        Tile(f"gain over the {rival}", figures.gain("accuracy", gain), figures.interval("accuracy", gain)),
    ]


def _evaluation(record: Record) -> Section:
    evaluation = record.evaluation
    drawn = f"temperature {evaluation['temperature']:g}" if evaluation["temperature"] else "greedily"
    each = (
        f"{evaluation['num_samples']} completions of each prompt"
        if evaluation["num_samples"] > 1
        else "each prompt once"
    )
    charts = [*_accuracies(evaluation)]
    if evaluation["num_samples"] > 1:
        charts.append(Chart("pass@k, %", _pass_at(evaluation), "held-out prompts of which one of k samples is right"))
    return Section(
        "Evaluation",
        f"Sampled {drawn}, {each}; right is what {evaluation['accuracy_reward']} gives 1. Policies are compared on the "
        "same prompts, pair by pair; intervals resample the prompts.",
        charts=[*charts, _lengths(record)],
        tables=[table for name in evaluation["sets"] for table in _set_tables(evaluation, name)],
    )


def _set_tables(evaluation: Mapping[str, Any], name: str) -> Iterator[Table]:
    found, policies = evaluation["sets"][name], evaluation["policies"]
    rivals = list(found["differences"])
    head = ["", *policies, *(f"trained − {rival}" for rival in rivals)]
    head += [f"probability better than {_rival(evaluation)}", "gain detectable from"]

    def cells(metric: str, figures_of: Mapping[str, Any], differences: Mapping[str, Any]) -> Iterator[Any]:
        for policy in policies:
            value = figures_of[policy].get(metric)
            yield (figures.amount(metric, value["mean"]), figures.interval(metric, value)) if value else figures.NONE
        for rival in rivals:
            value = differences[rival].get(metric)
            yield (figures.gain(metric, value), figures.interval(metric, value)) if value else ""
        against = differences[_rival(evaluation)].get(metric)
        judged = against and figures.has_direction(metric)
        yield figures.probability(against["probability_better"]) if judged else ""
        yield figures.detectable(metric, against) if judged else ""

    metrics = dict.fromkeys(metric for policy in policies for metric in found["policies"][policy])
    rows = [[figures.name_of(metric), *cells(metric, found["policies"], found["differences"])] for metric in metrics]
    yield Table(head, rows, f"{name}, {found['num_prompts']:,} prompts")
    if categories := found.get("categories"):
        rows = [
            [
                (category, f"{of_one['num_prompts']:,} prompts"),
                *cells("accuracy", of_one["policies"], of_one["differences"]),
            ]
            for category, of_one in categories.items()
        ]
        yield Table(["category", *head[1:]], rows, f"{name}, accuracy by category")


def _accuracies(evaluation: Mapping[str, Any]) -> Iterator[Chart]:
    """Of the policies on each set and category that has a scored prompt."""

    def points(found: Mapping[str, Any]) -> dict[str, tuple[float, float, float]]:
        figures_of = {policy: of_one["accuracy"] for policy, of_one in found["policies"].items()}
        return {policy: (it["mean"], it["low"], it["high"]) for policy, it in figures_of.items() if it["num_prompts"]}

    rows = []
    for name, found in evaluation["sets"].items():
        rows.append((name, points(found)))
        rows += [(f"· {category}", points(of_one)) for category, of_one in found.get("categories", {}).items()]
    rows = [(label, of_row) for label, of_row in rows if of_row]
    if rows:
        height = max(drawing.PANEL[1], 0.75 + len(rows) * (0.16 + 0.13 * len(evaluation["policies"])))
        picture = drawing.svg(lambda axes: drawing.forest(axes, rows, POLICY_COLOURS), (drawing.PANEL[0], height))
        yield Chart("Accuracy", picture, f"with {evaluation['confidence']:.0%} intervals")


def _pass_at(evaluation: Mapping[str, Any]) -> str:
    def draw(axes: Any) -> None:
        for policy in evaluation["policies"]:
            found = evaluation["sets"][HELD_OUT]["policies"][policy]
            at = {int(name.removeprefix("pass@")): it for name, it in found.items() if name.startswith("pass@")}
            axes.plot([*at], [100 * it["mean"] for it in at.values()], ".-", color=POLICY_COLOURS[policy], label=policy)
            bounds = ([100 * it[bound] for it in at.values()] for bound in ("low", "high"))
            axes.fill_between([*at], *bounds, color=POLICY_COLOURS[policy], alpha=0.15, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks([*at], [str(k) for k in at])
        axes.set(xlabel="k")
        drawing.legend_above(axes, len(evaluation["policies"]))

    return drawing.svg(draw)


def _lengths(record: Record) -> Chart:
    of_set = record.samples.filter(pl.col("set") == HELD_OUT)
    lengths = {policy: of_set[f"{policy}/completion_tokens"].to_list() for policy in record.evaluation["policies"]}
    colours = [POLICY_COLOURS[policy] for policy in lengths]
    note = f"held-out completions by their tokens; cut off at {record.config.evaluation_length:,}"
    return Chart("Completion lengths", drawing.svg(lambda axes: drawing.histogram(axes, lengths, colours)), note)


def _before_and_after(record: Record) -> Section:
    return Section("Before and after", samples={name: _kinds(record, name) for name in record.evaluation["sets"]})


def _kinds(record: Record, name: str) -> dict[str, dict[str, Any]]:
    """The prompts by what became of them from base to trained: how many, and a few of each, spread over the set."""
    of_set = record.samples.filter(pl.col("set") == name)
    keys = (record.config.rewards, record.evaluation["accuracy_reward"])
    before, after = (outcomes(of_set, name, policy, "accuracy", *keys) for policy in ("base", "trained"))
    rows = {
        "better": np.flatnonzero(after > before),
        "worse": np.flatnonzero(after < before),
        "still wrong": np.flatnonzero((after == before) & (after < 1)),
        "still right": np.flatnonzero((after == before) & (after == 1)),
    }
    return {
        kind: {
            "count": len(found),
            "shown": [_sample(record, of_set.filter(pl.col("row") == row)) for row in _spread(found, SHOWN[kind])],
        }
        for kind, found in rows.items()
        if len(found)
    }


def _spread(rows: np.ndarray, count: int) -> np.ndarray:
    return rows[np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(int))]


def _sample(record: Record, of_prompt: pl.DataFrame) -> dict[str, Any]:
    """A prompt with the first completion of each policy; of several, how many are right."""
    first, n = of_prompt.sort("sample").row(0, named=True), of_prompt.height
    policies = []
    for policy in record.evaluation["policies"]:
        rewards = of_prompt[f"{policy}/rewards/{record.evaluation['accuracy_reward']}"]
        scored = first[rewards.name] is not None
        policies.append(
            {
                "name": policy,
                "completion": _cut(first[f"{policy}/completion"]),
                "right": first[rewards.name] == 1 if scored else None,
                "of_all": f"{(rewards == 1).sum()} of {n} right, the first" if n > 1 else "",
                "tokens": first[f"{policy}/completion_tokens"],
                "truncated": first[f"{policy}/truncated"],
            }
        )
    return {
        "row": first["row"],
        "prompt": _messages(first["prompt"]),
        "answer": first.get("answer"),
        "category": first.get("category"),
        "policies": policies,
    }


def _messages(prompt: Any) -> list[tuple[str, str]]:
    """(role, text) of each message; of a plain prompt one without a role."""
    if isinstance(prompt, str):
        return [("", _cut(prompt))]
    return [(message["role"], _cut(message["content"])) for message in prompt]


def _cut(text: str) -> str:
    left_out = len(text) - LONGEST_TEXT
    return text if left_out <= 0 else f"{text[:LONGEST_TEXT]} … {left_out:,} more characters"
