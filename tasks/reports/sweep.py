"""Compares the arms of a sweep: which is chosen, which others may be the best, and one page with all of that.

The choice is made on the held-out prompts. Since the chosen arm is one of several, all intervals are simultaneous
(Bonferroni): with the stated confidence all of them hold together, including that of the chosen arm.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from grpo_core.config.evaluation import HELD_OUT
from grpo_core.config.run import RunConfig
from grpo_core.data.units import paired_units, per_unit
from grpo_core.errors import GrpoError
from grpo_core.evaluation.outcomes import bounds_of, grouped, unit_name, unit_numbers
from grpo_core.evaluation.statistics import Difference, SeedDifference, paired_difference, seed_difference
from tasks.rendering import figures
from tasks.rendering.drawing import LINE_COLOURS
from tasks.rendering.page import Cell, Section, Table, Verdict
from tasks.reports.compare import Records, comparison, outcomes_on, page_of, parameters_that_differ
from tasks.reports.cost import Cost, sum_metrics
from tasks.reports.record import NotEvaluatedError, Record, read_record
from tasks.stages.arms import arm_prefix, arms_of
from tasks.stages.run_directory import run_folder
from tasks.stages.trials import read_trials
from tasks.tracking.early_stop import read_rule, shared_level, stopped_arms

OWN_KEYS = ("name", "seed")  # in which the arms of one setting differ


@dataclass(frozen=True)
class Setting:
    """Arms that differ only in their seed. `arms`: name of the arm by seed; `values`: the metric by seed; `value`: its
    mean over the arms; `gain`: over the base model; `may_be_best`: True if no other setting is shown to be better."""

    label: str
    arms: Mapping[int, str]
    values: Mapping[int, float]
    value: float
    gain: Difference | SeedDifference
    may_be_best: bool


@dataclass(frozen=True)
class Choice:
    """The choice among a sweep's arms. `settings`: the best first, and after them those of which fewer seeds have a
    result: the ones that failed are likely the worst. `arm`: the chosen one, which is the best seed of the
    first setting. `by_seeds`: True if seeds are the unit of the intervals; otherwise prompts or
    groups are. `confidence`: with which all intervals hold together; if the sweep stops arms early (`stops`), with
    which also no arm is stopped wrongly. `stopped`: arms that were stopped, with the reasons; `stopped_settings`: their
    settings. `searched`: number of arms that a search has proposed."""

    metric: str
    settings: Sequence[Setting]
    arm: str
    by_seeds: bool
    confidence: float
    stopped: Mapping[str, str]
    stopped_settings: Sequence[str]
    stops: bool
    searched: int = 0

    @property
    def num_settings(self) -> int:
        """Number of all settings tried, including stopped ones, since each was a chance to be best by luck."""
        return len(self.settings) + len(self.stopped)

    @property
    def best(self) -> Setting:
        return self.settings[0]

    @property
    def incomplete(self) -> list[Setting]:
        """Settings of which fewer seeds have a result than of the best one."""
        return [setting for setting in self.settings if len(setting.arms) < len(self.best.arms)]


class NoChoiceError(GrpoError):
    """Raised if none of the arms can be chosen; the message says why."""

    exit_status = 1


def read_arms(sweep: str) -> dict[str, Record]:
    """Read the records of a sweep's evaluated arms, by the arm's name."""
    records = {}
    for name, config in arms_of(sweep).items():
        try:
            records[name] = read_record(run_folder(name), config)
        except NotEvaluatedError:
            continue
    return records


def read_choice(sweep: str) -> tuple[Choice, dict[str, Record]]:
    """Make the choice among the arms of a sweep; returns it and the arms' records. Raises NoChoiceError, see
    `make_choice`."""
    stopped = stopped_arms(sweep)
    arms = {name: record for name, record in read_arms(sweep).items() if name not in stopped}
    searched = len(read_trials(sweep))
    return make_choice(arms, arms_of(sweep), stopped, bool(read_rule(sweep)), searched), arms


def read_outcomes(sweep: str, names: Collection[str]) -> dict[str, float]:
    """Figure by which a choice compares arms, for each of these arms that has been evaluated."""
    arms = {name: record for name, record in read_arms(sweep).items() if name in names}
    metric = _metric(arms)
    means = {
        name: float(np.nanmean(per_unit(outcomes_on(record, HELD_OUT, metric), unit_numbers(record.samples, HELD_OUT))))
        for name, record in arms.items()
    }
    return {name: mean for name, mean in means.items() if math.isfinite(mean)}


def _metric(arms: Records) -> str:
    return "reward" if any(it.metric == "reward" for it in arms.values()) else "accuracy"


def make_choice(
    arms: Records,
    all_arms: Mapping[str, RunConfig] = MappingProxyType({}),
    stopped: Mapping[str, str] = MappingProxyType({}),
    stops: bool = False,
    searched: int = 0,
) -> Choice:
    """Choose the best setting on the held-out prompts, and determine which others may be the best.

    With several seeds per setting, seeds are the unit: trainings of two settings are paired by seed, and the prompts
    are taken as given. Otherwise distinct prompts are the unit, or their groups. A setting may be the best unless
    another one is better at the level (1 − confidence) / (number of settings − 1): the best one is among these with at
    least `confidence`.
    `all_arms`: configurations of the sweep's arms, also of those without a result. `stopped`: those that were stopped
    early, with the reasons; they count among the settings. `stops`: True if the sweep stops arms, which spends half of
    1 − confidence. `searched`: number of arms that a search has proposed. Raises NoChoiceError if no arm was evaluated,
    or if outcomes cannot be paired.
    """
    if not arms:
        raise NoChoiceError("no arm of the sweep has been evaluated: there is nothing to choose from")
    if len({record.evaluation["key"] for record in arms.values()}) > 1:
        raise NoChoiceError(
            "the arms were evaluated on different prompts or by different settings, so none can be chosen; run the "
            "sweep again, which evaluates again what has changed, or give it another --name"
        )
    first, metric = next(iter(arms.values())), _metric(arms)
    confidence = first.config.evaluation.confidence
    labels = _labels({**all_arms, **{name: record.config for name, record in arms.items()}})
    of_setting: dict[str, dict[int, str]] = {}
    for name, record in arms.items():
        of_setting.setdefault(labels[name], {})[record.config.seed] = name
    trained, base = (
        {name: outcomes_on(record, HELD_OUT, metric, policy) for name, record in arms.items()}
        for policy in ("trained", "base")
    )
    by_seeds = max(len(seeds) for seeds in of_setting.values()) > 1
    samples = grouped(*(record.samples for record in arms.values()))
    bounds, numbers = bounds_of(metric, first.config), unit_numbers(samples, HELD_OUT)

    def mean(values: np.ndarray) -> float:
        return float(np.nanmean(per_unit(values, numbers)))

    def difference(before: Mapping[int, np.ndarray], after: Mapping[int, np.ndarray], level: float) -> Any:
        """Compare two settings, each given as the arms' outcomes by seed."""
        if not by_seeds:
            (rival,), (policy,) = before.values(), after.values()
            return paired_difference(*paired_units(rival, policy, numbers), 1 - level, bounds)
        common = sorted(before.keys() & after.keys())
        rivals, policies = ([mean(of[seed]) for seed in common] for of in (before, after))
        return seed_difference(rivals, policies, 1 - level)

    after = {label: {seed: trained[name] for seed, name in seeds.items()} for label, seeds in of_setting.items()}
    before = {label: {seed: base[name] for seed, name in seeds.items()} for label, seeds in of_setting.items()}
    of_seeds = {label: {seed: mean(it) for seed, it in of.items()} for label, of in after.items()}
    values = {label: float(np.mean([*of.values()])) for label, of in of_seeds.items()}
    ranked = sorted(
        values, key=lambda it: (math.isnan(values[it]), -len(of_setting[it]), -np.nan_to_num(values[it], nan=0.0))
    )
    tried, level = len(ranked) + len(stopped), shared_level(confidence) if stops else 1 - confidence
    of_each, of_rivals = (level / max(1, count) for count in (tried, tried - 1))
    settings = []
    for place, label in enumerate(ranked):
        shown = any(
            difference(after[label], after[better], of_rivals).p_value <= of_rivals for better in ranked[:place]
        )
        gain = difference(before[label], after[label], of_each)
        settings.append(Setting(label, of_setting[label], of_seeds[label], values[label], gain, not shown))
    best = max(settings[0].arms.values(), key=lambda name: mean(trained[name]))
    of_stopped = [labels[name] for name in stopped]
    return Choice(metric, settings, best, by_seeds, confidence, stopped, of_stopped, stops, searched)


def _labels(configs: Mapping[str, RunConfig]) -> dict[str, str]:
    """Setting of each arm: the keys in which arms differ, with their values, as in `train.learning_rate=1e-05`."""
    differing = parameters_that_differ(configs.values(), OWN_KEYS)
    return {
        name: ", ".join(f"{key}={values[place]}" for key, values in differing.items()) or "the configuration"
        for place, name in enumerate(configs)
    }


def describe(choice: Choice) -> Verdict:
    """Describe the choice in a sentence, with the gain over the base model."""
    best, metric = choice.best, choice.metric
    gain = asdict(best.gain)
    gained = f"{figures.gain(metric, gain)} {figures.interval(metric, gain)}".strip()
    others = [setting.label for setting in choice.settings[1:] if setting.may_be_best]
    tone = "better" if best.gain.low > 0 else "worse" if best.gain.high < 0 else "open"
    rest = "Every other setting that finished is" if choice.stopped else "Every other setting is"
    also = f" Not shown to be worse: {'; '.join(others)}." if others else f" {rest} shown to be worse."
    return Verdict(
        tone,
        f"Chosen on {HELD_OUT}: {choice.arm}",
        f"{best.label}: {metric} {figures.amount(metric, best.value)}, {gained} over the base model."
        + (also if len(choice.settings) > 1 else "")
        + (f" Stopped early, so not compared at the end: {'; '.join(choice.stopped_settings)}." * bool(choice.stopped))
        + "".join(
            f" Ranked last, for want of results: {it.label} ({len(it.arms)} of {len(best.arms)} seeds)."
            for it in choice.incomplete
        )
        + (f" The best of {choice.num_settings} searched settings." if choice.searched else "")
        + " What it is worth shows on prompts by which it was not chosen.",
    )


def choice_section(choice: Choice, arms: Records) -> Section:
    """Section with the settings, the best first."""
    metric = choice.metric
    unit = "seeds" if choice.by_seeds else unit_name(grouped(*(record.samples for record in arms.values())))
    rows = []
    for setting in choice.settings:
        gain = asdict(setting.gain)
        rows.append(
            [
                setting.label,
                figures.amount(metric, setting.value),
                (figures.gain(metric, gain), figures.interval(metric, gain)),
                "yes" if setting.may_be_best else "no",
                _seeds(choice, setting) if choice.by_seeds else figures.NONE,
                *_costs([arms[name].cost for name in setting.arms.values()]),
            ]
        )
    text = (
        f"By {metric} on {HELD_OUT}; the unit is {unit}. With {choice.confidence:.0%}, all intervals hold together "
        f"(Bonferroni over {choice.num_settings} settings), and the best setting is among those that may be it"
        + (" or that were stopped." if choice.stopped else ".")
    )
    if choice.stops:
        text += (
            f" The {1 - choice.confidence:.0%} are shared: half for this, half for stopping an arm that was as "
            "good as each before it at every evaluation. That an arm behind then would also end behind is an "
            "assumption."
        )
    if choice.searched:
        text += (
            f" Optuna proposed {choice.searched} arms from the figures of earlier arms on the same prompts. "
            "The intervals allow for the number of settings, not for this search, and may be too narrow."
        )
    if choice.by_seeds:
        text += (
            " Intervals are Student's over seeds, right if seeds spread normally: a rare collapse is not in them. The "
            "prompts are taken as given."
        )
    names = ["setting", metric, "over the base", "may be the best", "seeds", "GPU hours", "cost"]
    known = [any(cell != figures.NONE for cell in column) for column in zip(*rows, strict=True)]
    head = [*itertools.compress(names, known)]
    rows = [[*itertools.compress(row, known)] for row in rows]
    notes = [f"{name}: {reason}" for name, reason in choice.stopped.items()]
    return Section("Choice", text, tables=[Table(head, rows)], notes=notes)


def _seeds(choice: Choice, setting: Setting) -> Cell:
    """Number of seeds that have a result, of how many if some are missing, and the metric of each."""
    of_all = f" of {len(choice.best.arms)}" if setting in choice.incomplete else ""
    each = (f"{seed}: {figures.amount(choice.metric, value)}" for seed, value in sorted(setting.values.items()))
    return f"{len(setting.arms)}{of_all}", ", ".join(each)


def _costs(costs: Sequence[Cost]) -> Iterator[str]:
    """Total GPU hours and money of several arms, if known for all of them."""
    total = sum_metrics(costs)
    for name in ("cost/gpu_hours", "cost/money"):
        yield figures.number(total[name]) if name in total else figures.NONE


def shown_arms(choice: Choice, arms: Records) -> tuple[dict[str, Record], int]:
    """Best arm of each of the best settings, the chosen one first, as many as there are distinguishable curves; and the
    total number of pairs of arms, 0 if prompts are not the unit. Names omit the sweep's."""
    names = [choice.arm, *(next(iter(setting.arms.values())) for setting in choice.settings[1:])]
    if choice.by_seeds:
        names = [*dict.fromkeys([choice.arm, *(name for it in choice.settings for name in it.arms.values())])]
    pairs = 0 if choice.by_seeds else max(1, math.comb(choice.num_settings, 2))
    prefix = arm_prefix(arms[choice.arm].config.registry.sweep or "")
    return {name.removeprefix(prefix): arms[name] for name in names[: len(LINE_COLOURS)]}, pairs


def sweep_sections(choice: Choice, arms: Records) -> list[Section]:
    """Sections of the choice and the comparison, without curves."""
    shown, pairs = shown_arms(choice, arms)
    return [choice_section(choice, arms), *comparison(shown, pairs)]


def sweep_page(sweep: str, choice: Choice, arms: Records) -> str:
    """Render the sweep as a self-contained HTML page."""
    shown, pairs = shown_arms(choice, arms)
    what = f"{len(arms)} arms" + (f", the first {len(shown)} with curves" if len(shown) < len(arms) else "")
    return page_of(sweep, what, shown, [describe(choice)], [choice_section(choice, arms)], pairs)
