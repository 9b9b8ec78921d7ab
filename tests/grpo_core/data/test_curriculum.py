"""What an epoch takes of its prompts, by their pass rates."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from grpo_core.config.files import parse_config
from grpo_core.config.inputs import CurriculumConfig
from grpo_core.data.curriculum import (
    PassRates,
    arrange,
    curriculum_notes,
    draw_turns,
    expected_turns,
    known_batches,
    no_rates,
    read_rates,
    variance,
    with_samples,
    write_rates,
)
from grpo_core.data.order import Schedule, epoch_rows, source_rows
from grpo_core.planning.plan import Plan, make_plan, plan_inputs
from grpo_core.planning.rules import PlanInputs, PlannedSource
from tests.conftest import config_values

KINDS: list[dict[str, Any]] = [{"kind": "easy_to_hard"}, {"kind": "band", "band": [0.2, 0.7]}, {"kind": "variance"}]


def _plan(num_prompts: int, prompts: int) -> Plan:
    return make_plan(PlanInputs(num_prompts, 2, 2 * prompts, max_completion_length=4, num_train_epochs=2.0))


def _rates(n: int, seed: int, completions: int = 8) -> PassRates:
    """Random rates; every fifth prompt has none."""
    rng = np.random.default_rng(seed)
    counts = np.where(np.arange(n) % 5 == 4, 0, completions)
    return PassRates(rng.binomial(counts, rng.random(n)).astype(float), counts, np.where(counts > 0, 0, -1))


@pytest.mark.slow
@pytest.mark.parametrize("keys", KINDS, ids=lambda keys: keys["kind"])
def test_every_generation_batch_is_full_of_distinct_prompts_whatever_the_rates(keys: dict[str, Any]) -> None:
    config, rng = CurriculumConfig(**keys), np.random.default_rng(0)
    for seed in range(300):
        size = int(rng.integers(1, 9))
        plan = _plan(int(rng.integers(size, 60)), size)
        rates = _rates(plan.num_prompts, seed, int(rng.choice([1, 2, 8])))
        if seed % 10 == 0:  # none is worth it, and one is
            rates.passed[:] = 0.0
            rates.passed[0] = rates.completions[0] / 2
        rows = arrange(epoch_rows(plan, seed, 1), rates, config, plan, seed, 1)
        again = arrange(epoch_rows(plan, seed, 1), rates, config, plan, seed, 1)
        assert (rows == again).all()
        assert len(rows) == plan.rollouts_per_epoch * plan.prompts_per_generation
        for index in range(plan.rollouts_per_epoch, 2 * plan.rollouts_per_epoch):
            prompts = Schedule(plan, seed, {1: rows}).prompts(index)
            assert len(set(prompts)) == len(prompts) == size
            found = Schedule(plan, seed, {1: rows}).fresh(index, prompts, prompts[:1] * 3)
            fresh = [row for row in found if row is not None]
            assert set(fresh) <= set(rows.tolist()) - set(prompts)
            assert len(set(fresh)) == min(3, len(set(rows.tolist())) - size)


def test_easy_to_hard_has_the_epochs_prompts_once_each_with_falling_rates_and_unknown_ones_in_the_middle() -> None:
    plan, rates = _plan(43, 4), _rates(43, 1)
    base = epoch_rows(plan, 3, 1)
    rows = arrange(base, rates, CurriculumConfig(kind="easy_to_hard"), plan, 3, 1)
    assert sorted(rows) == sorted(base[:40])
    assert (np.diff(np.where(rates.known, rates.rate, 0.5)[rows]) <= 0).all()
    equal = rows[rates.rate[rows] == rates.rate[rows[0]]]
    assert [row for row in base if row in equal] == equal.tolist(), "equals stay in the epoch's own order"


def test_a_band_shares_all_turns_evenly_among_the_prompts_within_it_and_those_without_a_rate() -> None:
    plan, rates = _plan(60, 4), _rates(60, 2)
    config = CurriculumConfig(kind="band", band=(0.2, 0.7))
    rows = arrange(epoch_rows(plan, 0, 1), rates, config, plan, 0, 1)
    inside = {row for row in range(60) if not rates.known[row] or 0.2 <= rates.passed[row] / 8 <= 0.7}
    turns = Counter(rows.tolist())
    assert set(turns) == inside and len(inside) < 60
    assert max(turns.values()) - min(turns.values()) <= 1


def test_a_band_with_too_few_prompts_for_a_generation_batch_takes_the_nearest_too() -> None:
    plan = _plan(8, 4)
    rates = PassRates(np.array([0, 1, 2, 3, 4, 8, 8, 8.0]), np.full(8, 8), np.zeros(8, int))
    rows = arrange(epoch_rows(plan, 0, 1), rates, CurriculumConfig(kind="band", band=(0.4, 0.6)), plan, 0, 1)
    assert Counter(rows.tolist()) == {1: 2, 2: 2, 3: 2, 4: 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "sources", [(), (PlannedSource("a", 8, 8), PlannedSource("b", 12, 6), PlannedSource("c", 20, 6))]
)
def test_turns_by_variance_have_exactly_the_expected_frequencies_over_seeds(sources: tuple[PlannedSource, ...]) -> None:
    """Each count is its expectation rounded up or down, and their mean over seeds is the expectation. Each source keeps
    its share."""
    plan = dataclasses.replace(_plan(20, 2), sources=sources)
    parts = source_rows(plan)
    rates = _rates(parts[-1].stop, 4)
    pairs = zip(rates.passed, rates.completions, strict=True)
    weights = np.array([(s + 1) * (n - s + 1) / ((n + 2) * (n + 3)) for s, n in pairs])
    expected = np.concatenate(
        [
            turns * weights[own.start : own.stop] / weights[own.start : own.stop].sum()
            for own, turns in zip(parts, [it.prompts_per_epoch for it in sources] or [20], strict=True)
        ]
    )
    assert expected.max() < 3, "no limit of a batch is felt here"
    counts = []
    for seed in range(2000):
        rows = arrange(epoch_rows(plan, seed, 1), rates, CurriculumConfig(kind="variance"), plan, seed, 1)
        counts.append(np.bincount(rows, minlength=len(weights)))
        assert (np.abs(counts[-1] - expected) < 1).all()
    parts = expected - np.floor(expected)
    error = np.sqrt(parts * (1 - parts) / len(counts))
    assert (np.abs(np.mean(counts, axis=0) - expected) < 4.5 * error + 1e-9).all()


def test_the_weight_of_a_prompt_is_the_mean_of_p_times_one_minus_p_over_what_p_may_be() -> None:
    p = (np.arange(100_000) + 0.5) / 100_000
    for s, n in ((0, 0), (0, 4), (3, 8), (8, 8)):
        likely = p**s * (1 - p) ** (n - s)
        expected = (likely * p * (1 - p)).sum() / likely.sum()
        rates = PassRates(np.array([float(s)]), np.array([n]), np.array([0]))
        assert variance(rates)[0] == pytest.approx(expected, abs=1e-6)


def test_turns_above_the_limit_go_to_the_others_in_proportion() -> None:
    assert expected_turns(np.array([10.0, 2.0, 1.0, 0.0]), 9, 5).tolist() == pytest.approx([5, 8 / 3, 4 / 3, 0])
    assert expected_turns(np.array([1e9, 1.0]), 8, 4).tolist() == [4, 4]


def test_drawn_turns_sum_up_exactly_for_any_start() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        expected = rng.dirichlet(np.full(7, 0.3)) * 11
        for start in (0.0, rng.random(), 1 - 2**-53):
            drawn = draw_turns(expected, start)
            assert drawn.sum() == 11
            assert (np.abs(drawn - expected) < 1 + 1e-8).all()


@pytest.mark.parametrize("keys", KINDS, ids=lambda keys: keys["kind"])
def test_without_any_rate_the_epoch_is_that_of_a_training_without_a_curriculum(keys: dict[str, Any]) -> None:
    plan = _plan(43, 4)
    rows = arrange(epoch_rows(plan, 5, 0), no_rates(43), CurriculumConfig(**keys), plan, 5, 0)
    for index in range(plan.rollouts_per_epoch):
        assert Schedule(plan, 5, {0: rows}).prompts(index) == Schedule(plan, 5).prompts(index)


def test_an_epoch_knows_all_batches_before_it_but_those_that_are_sampled_with_it() -> None:
    plan = _plan(40, 4)  # ten batches per epoch
    assert [known_batches(plan, epoch, 0) for epoch in (0, 1, 2)] == [0, 10, 20]
    assert [known_batches(plan, epoch, 3) for epoch in (0, 1, 2)] == [0, 7, 17]
    assert known_batches(plan, 1, 12) == 0


@pytest.mark.parametrize(
    ("train", "keys", "named"),
    [
        ({"num_train_epochs": 1}, {}, "train.num_train_epochs = 1: no epoch begins with pass rates"),
        ({"max_steps": 10}, {}, "train.max_steps = 10: no epoch begins with pass rates"),
        ({"max_steps": 11}, {}, ""),
        ({"num_train_epochs": 2}, {}, ""),
        ({"num_train_epochs": 1}, {"probe": 2}, ""),
        ({"num_train_epochs": 1}, {"kind": "none"}, ""),
    ],
    ids=["one epoch", "as many updates", "one more", "two epochs", "with a probe", "without a curriculum"],
)
def test_a_curriculum_that_would_never_know_a_pass_rate_is_noted(
    tmp_path: Path, train: dict[str, Any], keys: dict[str, Any], named: str
) -> None:
    values = config_values(tmp_path, tmp_path)
    del values["train"]["max_steps"]
    values["train"] |= train
    values["data"]["curriculum"] = {"kind": "variance", **keys}
    config = parse_config(values)
    notes = curriculum_notes(config, make_plan(plan_inputs(config, 40)))
    assert len(notes) == bool(named) and all(named in note for note in notes)


def test_a_rate_is_the_mean_over_all_scored_completions_and_survives_its_file(tmp_path: Path) -> None:
    rates = with_samples(no_rates(4), np.array([2, 2, 2, 0]), np.array([1.0, 0.0, np.nan, np.nan]), step=3)
    rates = with_samples(rates, np.array([2, 1]), np.array([0.25, 1.0]), step=5)
    assert rates.completions.tolist() == [0, 1, 3, 0]
    assert rates.rate[[1, 2]].tolist() == pytest.approx([1.0, 1.25 / 3]) and np.isnan(rates.rate[[0, 3]]).all()
    assert rates.last_step.tolist() == [-1, 5, 5, -1]
    write_rates(rates, tmp_path / "rates.parquet")
    read = read_rates(tmp_path / "rates.parquet", 4)
    assert read.completions.tolist() == [0, 1, 3, 0] and read.last_step.tolist() == [-1, 5, 5, -1]
    assert read.passed.tolist() == pytest.approx([0, 1.0, 1.25, 0])
    assert [path.name for path in tmp_path.iterdir()] == ["rates.parquet"]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"kind": "band"}, "set band"),
        ({"kind": "variance", "band": [0.1, 0.9]}, "is for kind='band'"),
        ({"kind": "band", "band": [0.9, 0.1]}, "between 0 and 1, the lower one first"),
        ({"kind": "band", "band": [0.1, 1.1]}, "between 0 and 1"),
        ({"probe": -1}, "greater than or equal to 0"),
    ],
)
def test_keys_of_a_curriculum_that_do_not_go_together_are_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        CurriculumConfig(**keys)
