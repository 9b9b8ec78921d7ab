"""Compares runs: how their parameters differ, their figures, and whether one is better than the first."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from grpo_core.config.base import flatten
from grpo_core.config.evaluation import EVALUATED_BY, HELD_OUT
from grpo_core.config.metrics import DECIDING, EVALUATED, TRAINED
from grpo_core.config.run import RunConfig
from grpo_core.data.units import paired_units
from grpo_core.evaluation.outcomes import PROMPT, bounds_of, grouped, outcomes, unit_name, unit_numbers
from grpo_core.evaluation.statistics import Difference, paired_difference
from tasks.rendering import drawing, figures
from tasks.rendering.drawing import series
from tasks.rendering.page import Cell, Chart, Section, Table, Verdict, render
from tasks.reports.record import Record

WEIGHT = re.compile(r"rewards\.\d+\.weight")
LAST = 0.1  # share of the updates that counts as the end of a training
ENDS = (
    *("reward", "completions/mean_length", "conversations/mean_turns"),
    *("frac_reward_zero_std", "entropy", "kl", "grad_norm"),
)
CURVES = ("reward", "eval_reward", "eval_accuracy", *ENDS[1:-1], "step_time")
Records = Mapping[str, Record]  # by the run's displayed name; all are compared with the first


@dataclass(frozen=True)
class Paired:
    """Difference of a run to the first on one evaluation set, by metric (a `Difference` as in report.json), and the
    reason why no metric, or not the reward, can be paired. `unit`: what is paired, prompts or groups of them."""

    differences: Mapping[str, Mapping[str, Any]]
    obstacle: str = ""
    unit: str = "prompts"


def parameters_that_differ(configs: Iterable[RunConfig], ignored: Collection[str] = ("name",)) -> dict[str, list[str]]:
    """Configuration keys, except the `ignored`, whose values differ between runs, with the value in each run."""
    values = [flatten(config.model_dump(mode="json", exclude_none=True)) for config in configs]
    keys = dict.fromkeys(key for of_run in values for key in of_run if key not in ignored)
    differing = [key for key in keys if len({json.dumps(of_run.get(key)) for of_run in values}) > 1]
    return {key: [str(of_run.get(key, figures.NONE)) for of_run in values] for key in differing}


def evaluation_sets(records: Records) -> list[str]:
    """Names of all runs' evaluation sets, in the order of the runs."""
    return [*dict.fromkeys(name for record in records.values() for name in record.evaluation["sets"])]


def paired_with_first(records: Records, name: str, pairs: int = 1) -> dict[str, Paired]:
    """Compare each other run's trained policy with that of the first, prompt by prompt of the evaluation set `name`, or
    group by group if one of the two has groups.
    `pairs`: see `comparison`."""
    (_, first), *others = records.items()
    return {label: _pair(first, other, name, pairs) for label, other in others}


def _pair(first: Record, other: Record, name: str, pairs: int) -> Paired:
    if first.evaluation["key"] != other.evaluation["key"]:
        return Paired({}, _what_differs(first, other))
    # Of each interval, so that all of them hold together with the configured one (Bonferroni).
    confidence = 1 - (1 - first.config.evaluation.confidence) / pairs
    samples = grouped(first.samples, other.samples)

    def difference(metric: str) -> Difference:
        before, after = (outcomes_on(record, name, metric) for record in (first, other))
        units = paired_units(before, after, unit_numbers(samples, name))
        return paired_difference(*units, confidence, bounds_of(metric, first.config))

    weights = _differing(first, other, WEIGHT.fullmatch)
    paired = [metric for metric in DECIDING if metric != "reward" or not weights]
    why = f"rewards weigh differently: {weights}" if weights else ""
    return Paired({metric: asdict(difference(metric)) for metric in paired}, why, unit_name(samples))


def outcomes_on(record: Record, name: str, metric: str, policy: str = "trained") -> np.ndarray:
    """A policy's metric on each row of an evaluation set. (N,)"""
    right = record.evaluation["accuracy_reward"]
    return outcomes(record.samples, name, policy, metric, record.config.rewards, right)


def _what_differs(first: Record, other: Record) -> str:
    """Return why the outcomes of two evaluations cannot be paired."""
    if differing := _differing(first, other, lambda key: key.startswith(EVALUATED_BY) and not WEIGHT.fullmatch(key)):
        return f"evaluated differently: {differing}"
    asked = [_asked(record) for record in (first, other)]
    if different := [name for name in {**asked[0], **asked[1]} if asked[0].get(name) != asked[1].get(name)]:
        return f"other prompts in {', '.join(different)}"
    return "the data or the source of a reward function has changed between their evaluations"


def _differing(first: Record, other: Record, chosen: Callable[[str], object]) -> str:
    """Those of the parameters that differ whose keys are chosen, with their values."""
    differing = parameters_that_differ([first.config, other.config])
    return ", ".join(f"{key} ({' / '.join(values)})" for key, values in differing.items() if chosen(key))


def _asked(record: Record) -> dict[str, list[Any]]:
    """Prompts of each evaluation set."""
    first = record.samples.filter(record.samples["sample"] == 0).sort("row")
    column = next(name for name in PROMPT if name in first.columns)
    return {name: of_set[column].to_list() for (name,), of_set in first.group_by("set", maintain_order=True)}


def end_of_training(record: Record) -> dict[str, str]:
    """Figures of a training's end: its counts, and means over its last updates."""
    rows = record.metrics[-max(1, round(LAST * len(record.metrics))) :]
    found = {"updates": f"{len(record.metrics):,}"}
    if record.result:
        found["completions"] = f"{record.result['counted']['completions']:,}"
        found["time in updates"] = figures.duration(record.result["train_seconds"])
        found |= dict(record.cost.rows())
    for metric in map(TRAINED.__getitem__, ENDS):
        values = [row[metric.name] for row in rows if metric.name in row]
        if values:
            mean = sum(values) / len(values)
            found[metric.heading] = figures.percent(mean) if metric.is_share else figures.number(mean)
    return found


def comparison(records: Records, pairs: int = 1) -> list[Section]:
    """Sections of the comparison, without the curves. `pairs`: number of pairs whose intervals should hold together, of
    which these are some; 0: compare nothing prompt by prompt."""
    labels = [*records]
    configs = (record.config for record in records.values())
    differing = [[key, *values] for key, values in parameters_that_differ(configs).items()]
    ends = {label: end_of_training(record) for label, record in records.items()}
    titles = dict.fromkeys(title for found in ends.values() for title in found)
    trained = [[title, *(found.get(title, figures.NONE) for found in ends.values())] for title in titles]
    return [
        Section(
            "Parameters that differ",
            text="" if differing else "None: the runs have the same configuration.",
            tables=[Table(["key", *labels], differing, words=True)] if differing else [],
        ),
        *(_evaluation(records, name, pairs) for name in evaluation_sets(records)),
        Section(
            "End of training",
            f"Means over the last {LAST:.0%} of the updates.",
            tables=[Table(["", *labels], trained)],
        ),
    ]


def _evaluation(records: Records, name: str, pairs: int) -> Section:
    first, *_ = records
    paired = paired_with_first(records, name, pairs) if pairs else {}
    rows = [
        [(label, metric), (figures.gain(metric, it), figures.interval(metric, it)), *_certainty(metric, it)]
        for label, found in paired.items()
        for metric, it in found.differences.items()
    ]
    head = ["", f"minus {first}", "probability better", "gain detectable from"]
    sets = [record.evaluation["sets"].get(name) for record in records.values()]
    by = "Group by group" if any(it.unit == "groups" for it in paired.values()) else "Prompt by prompt"
    counts = dict.fromkeys(figures.counts(found) for found in sets if found)
    return Section(
        f"Evaluation on {name}, {' or '.join(counts)}",
        tables=[
            Table(["", *records], [*_figures(sets, _metric(records))]),
            *([Table(head, rows, f"{by} against {first}{_together(records, pairs)}")] if rows else []),
        ],
        notes=[
            f"{'The reward of ' * bool(it.differences)}{label} cannot be paired with {first}: {it.obstacle}"
            for label, it in paired.items()
            if it.obstacle
        ],
    )


def _together(records: Records, pairs: int) -> str:
    """End of a title that says with which confidence all intervals hold together."""
    if pairs < 2:
        return ""
    confidence = next(iter(records.values())).config.evaluation.confidence
    return f"; all intervals hold together with {confidence:.0%} (Bonferroni over {pairs} pairs of arms)"


def _certainty(metric: str, found: Mapping[str, Any]) -> tuple[Cell, Cell]:
    better = figures.probability(found["probability_better"])
    return (better, f"p = {figures.p_value(found['p_value'])}"), figures.detectable(metric, found)


def _figures(sets: Sequence[Mapping[str, Any] | None], first: str) -> Iterator[list[Cell]]:
    """Rows of a table, one per metric, with one column per run; the first row is the base model's value of the metric
    `first`."""
    for policy, metric in (("base", first), *(("trained", metric) for metric in EVALUATED)):
        found = [of_run["policies"][policy].get(metric) if of_run else None for of_run in sets]
        if any(found):
            title = EVALUATED[metric].heading + (" of the base" if policy == "base" else "")
            yield [
                title,
                *((figures.amount(metric, it["mean"]), figures.interval(metric, it)) if it else "" for it in found),
            ]


def comparison_page(records: Records) -> str:
    """Render the comparison as a self-contained HTML page."""
    first, *_ = records
    return page_of(" · ".join(records), f"compared with {first}", records, [*_verdicts(records)])


def page_of(
    title: str, what: str, records: Records, verdicts: Sequence[Verdict], before: Sequence[Section] = (), pairs: int = 1
) -> str:
    """Render a page that compares runs, with the sections `before` first. `what`: subtitle; `pairs`: as in
    `comparison`."""
    parameters, *evaluations, end = comparison(records, pairs)
    colours = dict(zip(records, drawing.LINE_COLOURS, strict=False))
    training = replace(
        end,
        title="Training",
        text=f"Thin: each update; thick: mean of the last {drawing.WINDOW}. Below, means over the last {LAST:.0%} of "
        "the updates.",
        legend={label: drawing.PAGE_COLOURS[colour] for label, colour in colours.items()},
        charts=[*_overlaid(records, colours)],
    )
    return render(title, what, verdicts, [*before, parameters, *evaluations, training])


def _verdicts(records: Records) -> Iterator[Verdict]:
    """Yield a verdict on each other run against the first, on the held-out prompts."""
    first, metric = next(iter(records)), _metric(records)
    for label, paired in paired_with_first(records, HELD_OUT).items():
        if metric not in paired.differences:
            yield Verdict("open", f"{label} cannot be compared with {first}", paired.obstacle)
            continue
        it = paired.differences[metric]
        yield Verdict(
            figures.tone(it),
            f"{label}: {figures.verdict(metric, it, f'run {first}', paired.unit)}",
            f"{figures.gain(metric, it)} {figures.interval(metric, it)} on the same {it['num_units']:,} "
            f"{paired.unit}, probability of being better {figures.probability(it['probability_better'])}.",
        )


def _metric(records: Records) -> str:
    """Metric by which the first run compares policies."""
    return next(iter(records.values())).metric


def _overlaid(records: Records, colours: Mapping[str, str]) -> Iterator[Chart]:
    for metric in map(TRAINED.__getitem__, CURVES):
        found = {label: series(record.metrics, metric.name, metric.scale) for label, record in records.items()}
        lines = {label: points for label, points in found.items() if points}
        if lines:
            chosen = [colours[label] for label in lines]
            yield Chart(metric.title, drawing.svg(lambda axes: drawing.plot(axes, lines, chosen, legend=False)))  # noqa: B023
