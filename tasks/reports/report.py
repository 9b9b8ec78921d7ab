"""Writes report.html: what a run did and whether it helped, on one self-contained page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from grpo_core.config.evaluation import HELD_OUT, WARM_START
from grpo_core.config.metrics import evaluated_metric
from grpo_core.config.run import RunConfig
from grpo_core.evaluation.outcomes import outcomes, right
from tasks.rendering import drawing, figures
from tasks.rendering.drawing import BLUE, GREEN, GREY, ORANGE
from tasks.rendering.page import Chart, Section, Table, Tile, Verdict, render
from tasks.rendering.pictures import Pictures
from tasks.rendering.visible import shortened
from tasks.reports import training_sections
from tasks.reports.conversations import TURNS, conversation, in_training, messages, pictures_of
from tasks.reports.record import Record, read_record
from tasks.stages.files import write_text

PAGE = "report.html"
POLICY_COLOURS = {"base": GREY, "champion": ORANGE, WARM_START: GREEN, "trained": BLUE}
FAILED = "environment failed"
SHOWN = {"better": 4, "worse": 3, "unchanged": 2, "still wrong": 2, "still right": 1, FAILED: 2}  # prompts of each kind


def write_report(
    run: Path,
    config: RunConfig,
    folder: Path,
    evaluation: Mapping[str, Any],
    seconds: float,
    keys: Mapping[str, str],
    mlflow_run: str,
    commit: str,
) -> None:
    """Write report.html of a run into `folder`, which holds the samples.parquet of this `evaluation`."""
    record = read_record(run, config, evaluation=folder)
    write_text(
        folder / PAGE, report_page(replace(record, evaluation=dict(evaluation)), seconds, keys, mlflow_run, commit)
    )


def report_page(record: Record, seconds: float, keys: Mapping[str, str], mlflow_run: str, commit: str) -> str:
    """Render the page as HTML. `seconds`: duration of the evaluation. `keys`: lineage keys by stage. `mlflow_run`:
    address of the run in MLflow. `commit`: of the code that the run was trained with; "" if unknown."""
    pictures = pictures_of(record.images)
    sections = [
        _evaluation(record),
        training_sections.curves(record),
        _before_and_after(record, pictures),
        in_training(record, pictures),
        training_sections.plan_and_outcome(record),
        training_sections.time_spent(record, seconds),
        training_sections.data_section(record),
        training_sections.configuration(record, keys, commit),
    ]
    return render(
        record.config.name,
        record.config.model.name_or_path,
        [headline(record.evaluation, record.metric)],
        sections,
        _tiles(record.evaluation, record.metric),
        {"MLflow run": mlflow_run},
    )


def headline(evaluation: Mapping[str, Any], metric: str) -> Verdict:
    """Verdict on the held-out prompts, with figures: is the trained policy better than the champion or, without a
    champion, than the base?"""
    found, rival = evaluation["sets"][HELD_OUT], rival_of(evaluation)
    gain = found["differences"][rival][metric]
    unit = figures.unit(found)
    sentence = figures.verdict(metric, gain, _title(evaluation, rival), unit)
    sentence = f"{sentence[0].upper()}{sentence[1:]}"
    if not gain["num_units"]:
        return Verdict(figures.tone(gain), sentence)
    means = {policy: found["policies"][policy][metric]["mean"] for policy in evaluation["policies"]}
    steps = (f"{figures.amount(metric, mean)} ({policy})" for policy, mean in means.items())
    measure = "right" if metric == "accuracy" else f"mean {metric}"
    power = figures.power(metric, gain, unit)
    return Verdict(
        figures.tone(gain),
        sentence,
        f"{' → '.join(steps)} {measure} on {gain['num_units']:,} held-out {unit}. {figures.gain(metric, gain)} over "
        f"the {rival}, {gain['confidence']:.0%} interval {figures.interval(metric, gain)}, "
        f"probability of being better {figures.probability(gain['probability_better'])}. "
        f"{power[0].upper()}{power[1:]}.",
    )


def verdicts(report: Mapping[str, Any], metric: str) -> list[str]:
    """Sentences on the metric: one per set and policy that the trained one is compared with, and on what a warm start
    has given by itself."""
    return [
        f"{name}: {figures.verdict(metric, differences[metric], other, figures.unit(found))}"
        for name, found in report["sets"].items()
        for other, differences in found["differences"].items()
    ] + [
        f"{name}, the warm start by itself: {figures.verdict(metric, of_set['warm_start'][metric], 'base', of_unit)}"
        for name, of_set in report["sets"].items()
        for of_unit in [figures.unit(of_set)]
        if "warm_start" in of_set
    ]


def rows_of(of_set: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield a set's report as the rows of a table, head first. One row per metric: its mean under each policy, then the
    trained policy minus each other one, in points if the metric is a share."""
    policies, differences = of_set["policies"], of_set["differences"]
    yield [
        "",
        *policies,
        *(f"trained − {other} [{d['accuracy']['confidence']:.0%}]" for other, d in differences.items()),
    ]
    for metric in policies["trained"]:
        means = [
            figures.amount(metric, found[metric]["mean"]) if metric in found else "" for found in policies.values()
        ]
        gains = [found[metric] for found in differences.values()]
        changes = [f"{figures.gain(metric, found)} {figures.interval(metric, found)}" for found in gains]
        yield [metric, *means, *changes]


def rival_of(evaluation: Mapping[str, Any]) -> str:
    """Policy that the trained one has to beat: the champion or, without a champion, the base."""
    return "champion" if evaluation["champion"] else "base"


def _title(evaluation: Mapping[str, Any], policy: str) -> str:
    return f"champion (version {evaluation['champion']['version']})" if policy == "champion" else policy


def _tiles(evaluation: Mapping[str, Any], metric: str) -> list[Tile]:
    found, rival = evaluation["sets"][HELD_OUT], rival_of(evaluation)
    estimates = {policy: found["policies"][policy][metric] for policy in evaluation["policies"]}
    gain = found["differences"][rival][metric]
    return [
        *(
            Tile(_title(evaluation, policy), figures.amount(metric, it["mean"]), figures.interval(metric, it), policy)
            for policy, it in estimates.items()
        ),
        Tile(f"gain over the {rival}", figures.gain(metric, gain), figures.interval(metric, gain)),
    ]


def _evaluation(record: Record) -> Section:
    evaluation, metric = record.evaluation, record.metric
    drawn = f"temperature {evaluation['temperature']:g}" if evaluation["temperature"] else "greedily"
    each = (
        f"{evaluation['num_samples']} completions of each prompt"
        if evaluation["num_samples"] > 1
        else "each prompt once"
    )
    charts = [*_forest(evaluation, metric)]
    if evaluation["num_samples"] > 1:
        charts.append(Chart("pass@k, %", _pass_at(evaluation), "held-out prompts of which one of k samples is right"))
    return Section(
        "Evaluation",
        f"Sampled {drawn}, {each}. A completion is right if {_judge(evaluation)} gives it 1. Policies are "
        "compared on the same prompts, pair by pair; intervals are for other "
        f"{figures.unit(evaluation['sets'][HELD_OUT])} of the same kind.",
        charts=[*charts, _lengths(record)],
        tables=[table for name in evaluation["sets"] for table in _set_tables(evaluation, name, metric)],
    )


def _judge(evaluation: Mapping[str, Any]) -> str:
    """Name the reward that decides which completions are right, or that of each source."""
    given = evaluation["accuracy_reward"]
    return given if isinstance(given, str) else " or ".join(f"{name} ({source})" for source, name in given.items())


def _set_tables(evaluation: Mapping[str, Any], name: str, headlined: str) -> Iterator[Table]:
    found, policies = evaluation["sets"][name], evaluation["policies"]
    rivals = list(found["differences"])
    head = ["", *policies, *(f"trained − {rival}" for rival in rivals)]
    head += [f"probability better than {rival_of(evaluation)}", "gain detectable from"]

    def cells(metric: str, figures_of: Mapping[str, Any], differences: Mapping[str, Any]) -> Iterator[Any]:
        for policy in policies:
            value = figures_of[policy].get(metric)
            yield (figures.amount(metric, value["mean"]), figures.interval(metric, value)) if value else figures.NONE
        for rival in rivals:
            value = differences[rival].get(metric)
            yield (figures.gain(metric, value), figures.interval(metric, value)) if value else ""
        against = differences[rival_of(evaluation)].get(metric)
        judged = against and evaluated_metric(metric).more_is_better
        yield figures.probability(against["probability_better"]) if judged else ""
        yield figures.detectable(metric, against) if judged else ""

    metrics = dict.fromkeys(metric for policy in policies for metric in found["policies"][policy])
    rows = [
        [evaluated_metric(metric).heading, *cells(metric, found["policies"], found["differences"])]
        for metric in metrics
    ]
    yield Table(head, rows, f"{name}, {figures.counts(found)}")
    if categories := found.get("categories"):
        rows = [
            [
                (category, figures.counts(of_one)),
                *cells(headlined, of_one["policies"], of_one["differences"]),
            ]
            for category, of_one in categories.items()
        ]
        yield Table(["category", *head[1:]], rows, f"{name}, {headlined} by category")


def _forest(evaluation: Mapping[str, Any], metric: str) -> Iterator[Chart]:
    """Chart of the policies' metric on each set and category with a scored prompt."""

    def points(found: Mapping[str, Any]) -> dict[str, tuple[float, float, float]]:
        figures_of = {policy: of_one[metric] for policy, of_one in found["policies"].items()}
        return {policy: (it["mean"], it["low"], it["high"]) for policy, it in figures_of.items() if it["num_units"]}

    rows = []
    for name, found in evaluation["sets"].items():
        rows.append((name, points(found)))
        rows += [(f"· {category}", points(of_one)) for category, of_one in found.get("categories", {}).items()]
    rows = [(label, of_row) for label, of_row in rows if of_row]
    if rows:
        height = max(drawing.PANEL[1], 0.75 + len(rows) * (0.16 + 0.13 * len(evaluation["policies"])))
        shares = figures.is_share(metric)
        size = (drawing.PANEL[0], height)
        picture = drawing.svg(lambda axes: drawing.forest(axes, rows, POLICY_COLOURS, shares), size)
        yield Chart(evaluated_metric(metric).title, picture, f"with {evaluation['confidence']:.0%} intervals")


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


def _before_and_after(record: Record, pictures: Pictures) -> Section:
    legend = TURNS if record.config.environment.is_used else {}
    samples = {name: _kinds(record, name, pictures) for name in record.config.evaluation_files}
    return Section("Before and after", legend=legend, samples=samples)


def _kinds(record: Record, name: str, pictures: Pictures) -> dict[str, dict[str, Any]]:
    """Group the prompts by what changed from base to trained: the number of each kind, and a few examples from all over
    the set."""
    of_set, metric = record.samples.filter(pl.col("set") == name), record.metric
    before, after = (_outcomes(record, of_set, policy) for policy in ("base", "trained"))
    same = after == before
    kinds = {"better": after > before, "worse": after < before}
    if metric == "accuracy":
        kinds |= {"still wrong": same & (after < 1), "still right": same & (after == 1)}
    else:
        kinds["unchanged"] = same
    if "trained/environment_failure" in of_set.columns:
        lost = pl.any_horizontal(pl.col("base/environment_failure", "trained/environment_failure") != "")
        kinds[FAILED] = of_set.group_by("row").agg(it=lost.any()).sort("row")["it"].to_numpy()
    rows = {kind: np.flatnonzero(of_kind) for kind, of_kind in kinds.items()}
    return {
        kind: {
            "count": len(found),
            "shown": [
                _sample(record, of_set.filter(pl.col("row") == row), pictures) for row in _spread(found, SHOWN[kind])
            ],
        }
        for kind, found in rows.items()
        if len(found)
    }


def _spread(rows: np.ndarray, count: int) -> np.ndarray:
    return rows[np.unique(np.linspace(0, len(rows) - 1, min(count, len(rows))).round().astype(int))]


def _outcomes(record: Record, of_set: pl.DataFrame, policy: str) -> np.ndarray:
    """Outcome of the policy on each prompt of a set's samples, by the run's metric. (N,)"""
    keys = (record.metric, record.config.rewards, record.evaluation["accuracy_reward"])
    return outcomes(of_set, of_set["set"][0], policy, *keys)


def _sample(record: Record, of_prompt: pl.DataFrame, pictures: Pictures) -> dict[str, Any]:
    """Prompt with the first completion of each policy; if there are several, also the number that is right, or their
    mean reward."""
    of_prompt = of_prompt.sort("sample")
    first = of_prompt.row(0, named=True)
    policies = []
    for policy in record.evaluation["policies"]:
        mark, tone = _mark(record, of_prompt.head(1), policy)
        policies.append(
            {
                "name": policy,
                "completion": shortened(first[f"{policy}/completion"]),
                "mark": mark,
                "tone": tone,
                "of_all": _of_all(record, of_prompt, policy) if of_prompt.height > 1 else "",
                "tokens": first[f"{policy}/completion_tokens"],
                "truncated": first[f"{policy}/truncated"],
                "rewards": "",
                "pieces": (),
                "conversation": conversation(first, policy) if f"{policy}/conversation" in first else None,
            }
        )
    return {
        "row": first["row"],
        "prompt": messages(first["prompt"], pictures.of(first.get("images") or ())),
        "opening": shortened(first.get(f"{record.evaluation['policies'][-1]}/opening") or ""),
        "answer": first.get("answer"),
        "category": first.get("category"),
        "policies": policies,
    }


def _mark(record: Record, sample: pl.DataFrame, policy: str) -> tuple[str, str]:
    """Mark of one completion, and its tone: right, wrong, or "" if neither."""
    [outcome] = _outcomes(record, sample, policy)
    if np.isnan(outcome):
        return "not scored", ""
    if record.metric == "reward":
        return f"reward {figures.number(outcome)}", ""
    return ("✓ right", "right") if outcome == 1 else ("✗ wrong", "wrong")


def _of_all(record: Record, of_prompt: pl.DataFrame, policy: str) -> str:
    if record.metric == "reward":
        [mean] = _outcomes(record, of_prompt, policy)
        return f"mean of {of_prompt.height}: {figures.number(mean)}, the first:"
    count = of_prompt.select((right(policy, record.evaluation["accuracy_reward"]) == 1).sum()).item()
    return f"{count} of {of_prompt.height} right, the first"
