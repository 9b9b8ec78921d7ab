"""The order of prompts from several sources, against a plain enumeration of circles of cards."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.config.inputs import CurriculumConfig
from grpo_core.data.curriculum import PassRates, arrange
from grpo_core.data.order import Schedule, epoch_rows, source_counts, source_rows
from grpo_core.planning.plan import Plan, PlanError, make_plan, read_plan
from grpo_core.planning.rules import PlanInputs, PlannedSource

SEED = 7


def _plan(sizes: list[tuple[int, int]], prompts: int = 2, **rest: float) -> Plan:
    """The plan of sources with (rows, rows per epoch), and generation batches of so many prompts."""
    sources = tuple(PlannedSource(f"s{place}", *size) for place, size in enumerate(sizes))
    inputs = PlanInputs(sum(each for _, each in sizes), 2, 2 * prompts, max_completion_length=4, sources=sources)
    return make_plan(dataclasses.replace(inputs, **rest))  # type: ignore[arg-type]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    rows = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    sizes = [(n, draw(st.integers(1, n))) for n in rows]
    prompts = draw(st.integers(1, sum(each for _, each in sizes)))
    lengths = {"num_train_epochs": draw(st.sampled_from([0.4, 1, 2.5, 7]))}
    return _plan(sizes, prompts, **draw(st.sampled_from([lengths, {"max_steps": draw(st.integers(1, 30))}])))


@pytest.mark.slow
@given(plans(), st.integers(0, 2**31 - 1))
def test_the_counts_of_each_source_are_those_of_dealing_the_prompts_out(plan: Plan, seed: int) -> None:
    owner = [source.name for source in plan.sources for _ in range(source.num_prompts)]
    seen, dropped, size = Counter[str](), Counter[str](), plan.prompts_per_generation
    for rollout in range(plan.rollouts):
        batch = Schedule(plan, seed).prompts(rollout)
        assert len(set(batch)) == size
        seen.update(owner[row] for row in batch)
    whole_epochs = plan.rollouts // plan.rollouts_per_epoch
    for epoch in range(whole_epochs):
        rows = epoch_rows(plan, seed, epoch).tolist()
        first = epoch * plan.rollouts_per_epoch
        taken = [row for n in range(plan.rollouts_per_epoch) for row in Schedule(plan, seed).prompts(first + n)]
        assert rows[: len(taken)] == taken
        dropped.update(owner[row] for row in rows[len(taken) :])
    assert source_counts(plan, seed) == {
        it.name: {
            "num_prompts": it.num_prompts,
            "prompts_per_epoch": it.prompts_per_epoch,
            "prompts_seen": seen[it.name],
            "prompts_dropped": dropped[it.name],
            "passes": round(seen[it.name] / it.num_prompts, 3),
        }
        for it in plan.sources
    }
    assert (sum(seen.values()), sum(dropped.values())) == (plan.prompts_seen, plan.prompts_dropped)


@given(plans(), st.integers(0, 2**31 - 1), st.integers(1, 12))
def test_an_epoch_has_each_sources_share_and_shows_all_of_its_rows_equally_often(
    plan: Plan, seed: int, epochs: int
) -> None:
    shown = Counter[int]()
    for epoch in range(epochs):
        rows = epoch_rows(plan, seed, epoch).tolist()
        assert len(set(rows)) == len(rows) == plan.num_prompts
        for source, own in zip(plan.sources, source_rows(plan), strict=True):
            assert sum(row in own for row in rows) == source.prompts_per_epoch
        shown.update(rows)
    for own in source_rows(plan):
        times = [shown[row] for row in own]
        assert max(times) - min(times) <= 1


KINDS = [
    CurriculumConfig(kind="easy_to_hard"),
    CurriculumConfig(kind="band", band=(0.2, 0.7)),
    CurriculumConfig(kind="variance"),
]


@pytest.mark.slow
@given(plans(), st.sampled_from(KINDS), st.integers(0, 2**31 - 1), st.data())
def test_a_curriculum_fills_each_sources_places_of_every_batch_with_others_of_its_prompts(
    plan: Plan, config: CurriculumConfig, seed: int, data: st.DataObject
) -> None:
    """What the plan counts of each source is right with every curriculum, whatever pass rates are known, few or all."""
    sources, epoch = source_rows(plan), data.draw(st.integers(0, 3))
    size, n = plan.prompts_per_generation, sources[-1].stop
    tries = np.array(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    tries[sources[0].start : sources[0].stop] *= data.draw(st.booleans())  # of this source no rate is known
    passed = np.array([data.draw(st.integers(0, count)) for count in tries.tolist()], float)
    rates, rows = PassRates(passed, tries, tries * 0), epoch_rows(plan, seed, epoch)
    found = arrange(rows, rates, config, plan, seed, epoch)
    assert (arrange(rows, rates, config, plan, seed, epoch) == found).all()
    owner = np.repeat(np.arange(len(sources)), [len(own) for own in sources])
    assert (owner[found] == owner[rows[: len(found)]]).all()
    for number in range(plan.rollouts_per_epoch):
        index = epoch * plan.rollouts_per_epoch + number
        batch = Schedule(plan, seed, {epoch: found}).prompts(index)
        assert len(set(batch)) == len(batch) == size
        fresh = Schedule(plan, seed, {epoch: found}).fresh(index, set(batch), batch[:1])[0]
        assert fresh is None or (owner[fresh] == owner[batch[0]] and fresh in found)
    for own in sources:
        turns, known = found[np.isin(found, own)].tolist(), rates.known[own.start : own.stop]
        if config.kind == "easy_to_hard" or not known.any():
            assert sorted(turns) == sorted(row for row in rows[: len(found)].tolist() if row in own)
        elif config.kind == "band":
            counts, away = Counter(turns), np.abs(rates.rate - np.clip(rates.rate, 0.2, 0.7))
            farthest = max((away[row] for row in turns if rates.known[row]), default=0.0)
            nearer = [row for row in own if not rates.known[row] or away[row] < farthest]
            if farthest and any(rates.known[row] for row in nearer):
                assert len(nearer) < len(turns), "prompts outside of the band are taken only if it has too few"
            assert max(counts.values(), default=0) - min(counts.values(), default=0) <= 1


def test_epochs_of_half_a_source_show_its_halves_in_turn() -> None:
    plan = _plan([(10, 5), (8, 8)])
    halves = [{row for row in epoch_rows(plan, SEED, epoch).tolist() if row < 10} for epoch in range(4)]
    assert halves[0] | halves[1] == set(range(10)) and halves[2:] == halves[:2]
    assert epoch_rows(plan, SEED, 0).tolist() != epoch_rows(plan, SEED, 2).tolist(), "in another order"


def test_sources_are_mixed_within_an_epoch_and_every_seed_mixes_them_otherwise() -> None:
    plan = _plan([(500, 500), (500, 500)])
    early = sum(row < 500 for row in epoch_rows(plan, SEED, 0)[:500].tolist())
    assert 200 < early < 300
    assert epoch_rows(plan, SEED, 0).tolist() != epoch_rows(plan, SEED + 1, 0).tolist()


@pytest.mark.slow
@given(plans(), st.data())
def test_a_fresh_prompt_is_of_the_source_of_the_one_it_replaces(plan: Plan, data: st.DataObject) -> None:
    batch = Schedule(plan, SEED).prompts(0)
    replaced = data.draw(st.lists(st.sampled_from(batch), unique=True))
    fresh = Schedule(plan, SEED).fresh(0, set(batch), replaced)
    found = [row for row in fresh if row is not None]
    assert len(set(found)) == len(found) and not set(found) & set(batch)
    for own in source_rows(plan):
        of_source = [new for old, new in zip(replaced, fresh, strict=True) if old in own]
        assert all(row is None or row in own for row in of_source)
        left = len(own) - sum(row in own for row in batch)
        assert sum(row is not None for row in of_source) == min(left, len(of_source))


def test_fresh_prompts_are_taken_from_the_whole_source_shuffled() -> None:
    """By a plain shuffle of all rows with the same numbers; and each order of four comes about as often."""
    plan, orders = _plan([(4, 4)]), Counter[tuple[int | None, ...]]()
    for index in range(2400):
        rng, rows, expected = np.random.default_rng([SEED, index, 2, 0]), [*range(4)], list[int]()
        while rows:
            place = int(rng.integers(len(rows)))
            expected.append(rows[place])
            rows[place] = rows[-1]
            rows.pop()
        found = tuple(Schedule(plan, SEED).fresh(index, (), [0] * 5))
        assert found == (*expected, None)
        orders[found] += 1
    assert len(orders) == 24 and all(60 < count < 145 for count in orders.values())


def test_one_source_is_ordered_as_without_sources() -> None:
    plain = make_plan(PlanInputs(23, 2, 4, max_completion_length=4))
    assert epoch_rows(plain, SEED, 3).tolist() == [
        *[21, 19, 7, 17, 22, 2, 5, 13, 10, 8, 12, 3],
        *[4, 0, 18, 11, 15, 14, 20, 16, 1, 9, 6],
    ]


def test_a_source_that_gives_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match=r"the source 's1' with 3 prompts gives none per epoch: raise its epochs"):
        _plan([(8, 8), (3, 0)])


def test_a_plan_with_sources_is_read_as_it_was_written() -> None:
    plan = _plan([(10, 5), (8, 8)])
    assert read_plan(json.loads(json.dumps(dataclasses.asdict(plan)))) == plan
