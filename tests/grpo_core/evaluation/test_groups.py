"""Prompts that belong together count once: figures are those of the groups' means, in whatever order the rows are."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.config.files import parse_config
from grpo_core.data.prompts import Prompts
from grpo_core.data.units import paired_units, per_unit
from grpo_core.errors import GrpoError
from grpo_core.evaluation.comparison import compare_policies
from grpo_core.evaluation.outcomes import unit_numbers
from grpo_core.evaluation.samples import prompt_columns, samples_table
from grpo_core.evaluation.statistics import BINARY, estimate, paired_difference
from tests.made_up import NUM_PROMPTS, outcomes_of, samples_of, values_of

CONFIG = parse_config(values_of("sums", evaluation={"group_column": "passage"}))
PASSAGES = [f"passage {row % 12}" for row in range(NUM_PROMPTS)]


def test_the_figures_of_a_report_are_those_of_the_groups() -> None:
    right = {"base": outcomes_of(0, 0.3), "trained": outcomes_of(1, 0.6)}
    samples = samples_of(right, categories=["even", "odd"]).with_columns(group=pl.Series(PASSAGES))
    found = compare_policies(samples, CONFIG, ["base", "trained"])["held-out"]
    before, after = (values.reshape(5, 12).mean(axis=0) for values in right.values())
    assert (found["num_prompts"], found["num_groups"]) == (60, 12)
    assert found["policies"]["trained"]["accuracy"] == asdict(estimate(after, 0.95, BINARY))
    assert found["differences"]["base"]["accuracy"] == asdict(paired_difference(before, after, 0.95, BINARY))
    even = found["categories"]["even"]
    assert (even["num_prompts"], even["num_groups"]) == (30, 6)
    assert even["policies"]["trained"]["accuracy"]["num_units"] == 6


@given(groups=st.lists(st.integers(0, 3), min_size=1, max_size=8), data=st.data())
def test_only_prompts_that_were_scored_for_both_are_compared_within_a_group(
    groups: list[int], data: st.DataObject
) -> None:
    """Else the mean over a group's easy prompts would be held against that over its hard ones."""
    outcomes = st.lists(st.sampled_from([0.0, 1.0, math.nan]), min_size=len(groups), max_size=len(groups))
    before, after = (np.array(data.draw(outcomes)) for _ in range(2))
    numbers = np.array(groups)
    one, other = paired_units(before, after, numbers)
    assert other - one == pytest.approx(per_unit(after - before, numbers), nan_ok=True)
    assert not (np.isnan(one) ^ np.isnan(other)).any()


def test_an_evaluation_s_samples_have_the_groups_that_the_column_names() -> None:
    rows = [{"prompt": f"{row}", "passage": passage} for row, passage in enumerate((7, "b", 7))]
    samples = samples_table(prompt_columns("held-out", Prompts(rows, [], 1), CONFIG), [])
    assert samples["group"].to_list() == ["7", "b", "7"]
    assert unit_numbers(samples, "held-out").tolist() == [0, 1, 0]
    for row in ({"prompt": "3"}, {"prompt": "3", "passage": None}):
        with pytest.raises(GrpoError, match="'passage': an evaluated prompt has no value in this column"):
            prompt_columns("held-out", Prompts([*rows, row], [], 1), CONFIG)
