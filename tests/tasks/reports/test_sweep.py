"""The choice among a sweep's arms: the best is chosen, intervals hold together, the best one is seldom excluded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from grpo_core.config.files import parse_config
from grpo_core.evaluation.statistics import paired_difference, seed_difference
from tasks.reports.record import Record
from tasks.reports.sweep import (
    NoChoiceError,
    choice_section,
    describe,
    make_choice,
    read_arms,
    read_outcomes,
    shown_arms,
    sweep_page,
    sweep_sections,
)
from tests.made_up import NUM_PROMPTS, made_up_run, metrics_of, outcomes_of, samples_of, values_of
from tests.pages import Page

BASE = outcomes_of(0, 0.3)


def arm(rate: float, right: np.ndarray, seed: int = 0, base: np.ndarray = BASE, key: str = "same") -> Record:
    """A record with nothing but what a choice reads."""
    name = f"sums.sweep.learning_rate-{rate}_seed-{seed}"
    values = values_of(name, train={"learning_rate": rate}, registry={"sweep": "sums.sweep"})
    config = parse_config({**values, "seed": seed})
    evaluation = {"key": key, "deciding_metric": "accuracy", "accuracy_reward": "numeric_match"}
    samples = samples_of({"base": base, "trained": right})
    result = {"resumed_at_step": None, "train_seconds": 1.0, "sampled_tokens": 9}
    return Record(config, {}, {}, result, evaluation, {}, [], [], [], samples)


def named(*records: Record) -> dict[str, Record]:
    return {record.config.name: record for record in records}


def first(count: int) -> np.ndarray:
    """The first of the prompts right."""
    return (np.arange(NUM_PROMPTS) < count).astype(float)


def test_the_best_is_chosen_and_its_interval_allows_for_the_number_of_arms() -> None:
    counts = {0.1: 30, 0.2: 45, 0.3: 44, 0.4: 10}
    choice = make_choice(named(*(arm(rate, first(count)) for rate, count in counts.items())))
    assert choice.arm == "sums.sweep.learning_rate-0.2_seed-0"
    assert [it.label for it in choice.settings] == [f"train.learning_rate={rate}" for rate in (0.2, 0.3, 0.1, 0.4)]
    expected = paired_difference(BASE, first(45), 1 - 0.05 / 4, (0.0, 1.0))
    assert choice.best.gain == expected
    assert expected.low < paired_difference(BASE, first(45), 0.95, (0.0, 1.0)).low
    # One win more is nothing; 15 of 15 are p = 2⁻¹⁵, and the level is 0.05 / 3.
    assert [it.may_be_best for it in choice.settings] == [True, True, False, False]
    assert "Not shown to be worse: train.learning_rate=0.3." in describe(choice).sentence


def test_seeds_are_the_unit_where_there_are_several() -> None:
    counts = {0.1: (30, 36, 33), 0.2: (40, 44, 45)}
    arms = named(*(arm(rate, first(count), seed) for rate, of in counts.items() for seed, count in enumerate(of)))
    choice = make_choice(arms)
    assert (choice.by_seeds, choice.arm) == (True, "sums.sweep.learning_rate-0.2_seed-2")
    gains = np.array([40, 44, 45]) / NUM_PROMPTS - BASE.mean()
    interval = stats.t.interval(1 - 0.05 / 2, 2, loc=gains.mean(), scale=stats.sem(gains))
    assert (choice.best.gain.low, choice.best.gain.high) == pytest.approx(interval)
    paired = stats.ttest_rel([40, 44, 45], [30, 36, 33], alternative="greater")
    assert choice.settings[1].may_be_best == (paired.pvalue > 0.05) == False  # noqa: E712
    assert choice.best.value == pytest.approx(np.mean([40, 44, 45]) / NUM_PROMPTS)
    assert seed_difference([0, 0, 0], [1, 3, 2], 0.9).p_value == pytest.approx(
        stats.ttest_1samp([1, 3, 2], 0, alternative="greater").pvalue
    )


@given(start=st.lists(st.integers(0, 60), min_size=2, max_size=5), more=st.integers(0, 40))
def test_seeds_that_gain_the_same_show_no_spread_and_so_nothing(start: list[int], more: int) -> None:
    """A tie has one p-value, 1, in whichever way the shares of right answers are rounded."""
    before, after = np.array(start) / 100, (np.array(start) + more) / 100
    found = seed_difference(before, after, 0.9)
    assert math.isnan(found.low) and math.isnan(found.high) and found.p_value == 1
    assert found.mean == pytest.approx(more / 100)


def test_the_one_seed_that_survived_does_not_win_against_settings_of_which_all_did() -> None:
    """A learning rate at which two trainings of three crash is not the best one, whatever the third came to."""
    whole = [arm(0.1, first(count), seed) for seed, count in enumerate((40, 44, 42))]
    choice = make_choice(named(*whole, arm(0.2, first(50), 2)))
    assert [it.label for it in choice.settings] == ["train.learning_rate=0.1", "train.learning_rate=0.2"]
    assert choice.arm == "sums.sweep.learning_rate-0.1_seed-1"
    assert "Ranked last, for want of results: train.learning_rate=0.2 (1 of 3 seeds)." in describe(choice).sentence
    assert [it.label for it in choice.incomplete] == ["train.learning_rate=0.2"]


def test_seeds_of_one_setting_are_a_sweep_too() -> None:
    choice = make_choice(named(*(arm(0.1, first(count), seed) for seed, count in enumerate((30, 36)))))
    assert (choice.best.label, choice.arm) == ("the configuration", "sums.sweep.learning_rate-0.1_seed-1")
    assert choice.best.may_be_best


def test_groups_are_the_unit_where_prompts_belong_together() -> None:
    """15 prompts more than another arm are three groups of five: too few to show that the other is worse."""
    arms = named(arm(0.1, first(45)), arm(0.2, first(30)))
    groups = np.arange(NUM_PROMPTS) // 5
    grouped = {name: replace(it, samples=it.samples.with_columns(group=groups)) for name, it in arms.items()}
    whole, choice = make_choice(arms), make_choice(grouped)
    assert [it.may_be_best for it in whole.settings] == [True, False]
    assert [it.may_be_best for it in choice.settings] == [True, True]
    assert "; the unit is groups. With 95%" in choice_section(choice, grouped).text
    base, best = (values.reshape(12, 5).mean(axis=1) for values in (BASE, first(45)))
    assert choice.best.gain == paired_difference(base, best, 1 - 0.05 / 2, (0.0, 1.0))


def test_the_table_shows_each_seed() -> None:
    whole = named(*(arm(0.1, first(count), seed) for seed, count in enumerate((30, 36, 33))), arm(0.2, first(3), 2))
    [table] = choice_section(make_choice(whole), whole).tables
    assert [row[table.head.index("seeds")] for row in table.rows] == [
        ("3", "0: 50.0%, 1: 60.0%, 2: 55.0%"),
        ("1 of 3", "2: 5.0%"),
    ]


def test_stopping_and_choosing_share_the_error_that_is_allowed() -> None:
    """6 wins of 6 are p = 1/64, between half of 5 %, shared by two other settings, and the whole of it."""
    arms = named(arm(0.1, first(36)), arm(0.2, first(30)))
    stopped = {"sums.sweep.learning_rate-0.3_seed-0": "stopped after update 20 of 200"}
    all_arms = {name: record.config for name, record in named(*arms.values(), arm(0.3, first(0))).items()}
    choice = make_choice(arms, all_arms, stopped, stops=True)
    assert [it.may_be_best for it in choice.settings] == [True, True]
    assert not make_choice(arms, all_arms, stopped).settings[1].may_be_best
    assert choice.best.gain == paired_difference(BASE, first(36), 1 - 0.025 / 3, (0.0, 1.0))
    assert make_choice(arms, stops=True).best.gain == paired_difference(BASE, first(36), 1 - 0.025 / 2, (0.0, 1.0)), (
        "whether or not an arm is stopped"
    )
    section = choice_section(choice, arms)
    assert "and the best setting is among those that may be it or that were stopped." in section.text
    assert "The 5% are shared: half for this, half for stopping an arm that was as good" in section.text
    assert section.notes == ["sums.sweep.learning_rate-0.3_seed-0: stopped after update 20 of 200"]
    whole = choice_section(make_choice(arms), arms).text
    assert "among those that may be it." in whole and "shared" not in whole


@pytest.mark.parametrize("stopped", [(0.2, 0.3), (0.3,)], ids=["others stopped", "one failed"])
def test_the_only_arm_that_finished_is_named_by_its_value(stopped: tuple[float, ...]) -> None:
    all_arms = {name: it.config for name, it in named(*(arm(rate, first(9)) for rate in (0.1, 0.2, 0.3))).items()}
    names = {rate: name for rate, name in zip((0.1, 0.2, 0.3), all_arms, strict=True) if rate in stopped}
    choice = make_choice(named(arm(0.1, first(30))), all_arms, dict.fromkeys(names.values(), "behind"), stops=True)
    said = describe(choice).sentence
    assert said.startswith("train.learning_rate=0.1: accuracy 50.0%, ")
    labels = "; ".join(f"train.learning_rate={rate}" for rate in stopped)
    assert f" Stopped early, so not compared at the end: {labels}." in said
    assert "shown to be worse" not in said


@pytest.mark.slow
def test_the_best_arm_is_excluded_and_an_interval_misses_no_more_often_than_stated() -> None:
    """60 prompts, 5 arms, 3 as good as the best; 60 sweeps, whose misses are within two standard errors of 5 %."""
    rates, rng = [0.5, 0.5, 0.5, 0.4, 0.3], np.random.default_rng(0)
    excluded = missed = 0
    for _ in range(60):
        base = (rng.random(NUM_PROMPTS) < 0.3).astype(float)
        arms = named(
            *(arm(n / 10, (rng.random(NUM_PROMPTS) < rate) * 1.0, base=base) for n, rate in enumerate(rates, 1))
        )
        choice = make_choice(arms)
        of_rate = {f"train.learning_rate={n / 10}": rate for n, rate in enumerate(rates, 1)}
        excluded += not next(it for it in choice.settings if of_rate[it.label] == 0.5).may_be_best
        missed += not all(it.gain.low <= of_rate[it.label] - 0.3 <= it.gain.high for it in choice.settings)
    most = 60 * 0.05 + 2 * math.sqrt(60 * 0.05 * 0.95)
    assert excluded <= most
    assert missed <= most


def test_arms_that_cannot_be_paired_are_not_chosen_from() -> None:
    with pytest.raises(NoChoiceError, match="evaluated on different prompts"):
        make_choice(named(arm(0.1, first(30)), arm(0.2, first(40), key="other")))
    with pytest.raises(NoChoiceError, match="no arm of the sweep has been evaluated"):
        make_choice({})


@pytest.mark.slow
def test_page_and_terminal_show_the_choice_and_compare_the_arms_by_intervals_that_hold_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    runs = tmp_path / "runs"
    for rate, count in {0.1: 30, 0.2: 45, 0.3: 41}.items():
        for sweep, name in (("sums.sweep", f"sums.sweep.rate-{rate}"), ("sums.sweep-2", f"sums.sweep-2.rate-{rate}")):
            values: Mapping[str, Any] = values_of(name, train={"learning_rate": rate}, registry={"sweep": sweep})
            made_up_run(runs / name, values, samples_of({"base": BASE, "trained": first(count)}), metrics_of())
    (runs / "sums.sweep.rate-0.3" / "evaluation" / "report.json").unlink()
    made_up_run(
        runs / "sums.sweep.no-arm", values_of("sums.sweep.no-arm"), samples_of({"base": BASE, "trained": BASE}), []
    )
    arms = read_arms("sums.sweep")
    assert [*arms] == ["sums.sweep.rate-0.1", "sums.sweep.rate-0.2"], "neither other sweeps nor what is not evaluated"

    arms = read_arms("sums.sweep-2")
    choice = make_choice(arms)
    assert [*shown_arms(choice, arms)[0]] == ["rate-0.2", "rate-0.3", "rate-0.1"]
    page = Page(sweep_page("sums.sweep-2", choice, arms))
    assert "Optuna" not in page.text
    searched = Page(sweep_page("sums.sweep-2", replace(choice, searched=3), arms)).text
    assert "The best of 3 searched settings. What it is worth shows on prompts by which it was not chosen." in searched
    assert "Optuna proposed 3 arms from the figures of earlier arms on the same prompts." in searched
    means = {f"sums.sweep-2.rate-{rate}": count / NUM_PROMPTS for rate, count in ((0.1, 30), (0.2, 45))}
    assert read_outcomes("sums.sweep-2", means) == pytest.approx(means), "those asked for, by what the page compares by"
    found = asdict(paired_difference(first(45), first(41), 1 - 0.05 / 3, (0.0, 1.0)))
    assert f"[{100 * found['low']:.1f}, {100 * found['high']:.1f}]" in page.text
    assert "Bonferroni over 3 pairs of arms" in page.text
    assert "Chosen on held-out: sums.sweep-2.rate-0.2" in page.text
    assert page.references == set()
    assert [section.title for section in sweep_sections(choice, arms)] == [
        "Choice",
        "Parameters that differ",
        "Evaluation on held-out, 60 prompts",
        "End of training",
    ]
