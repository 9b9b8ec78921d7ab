"""Figures in words: what a paired difference says."""

from __future__ import annotations

import math
import re

import pytest

from grpo_core.evaluation.statistics import paired_difference
from tasks.rendering.figures import verdict


@pytest.mark.parametrize(
    ("metric", "before", "after", "sentence"),
    [
        (
            "accuracy",
            [0.0] * 20,
            [1.0] * 10 + [0.0] * 10,
            r"better than the base by 50\.0 points \(p = 0\.00098\)",
        ),
        ("accuracy", [1.0] * 20, [0.0] * 10 + [1.0] * 10, r"worse than the base by 50\.0 points"),
        (
            "accuracy",
            [0.0, 1.0] * 10,
            [1.0, 0.0] * 10,
            r"no difference from the base could be shown: with 20 prompts, a true gain of \d+\.\d points or "
            r"more is detected 80% of the time",
        ),
        (
            "accuracy",
            [0.0] + [1.0] * 19,
            [1.0] + [0.0] * 5 + [1.0] * 14,
            r"likely worse than the base by 20\.0 points, which is not shown yet: the interval is "
            r"\[-\d+\.\d, \d\.\d\]; with 20 prompts, a true gain of \d+\.\d points or more is detected 80% of the time",
        ),
        (
            "accuracy",
            [1.0] + [0.0] * 19,
            [0.0] + [1.0] * 5 + [0.0] * 14,
            r"likely better than the base by 20\.0 points, which is not shown yet: the interval is .*",
        ),
        ("accuracy", [math.nan], [1.0], "no comparison with the base: no prompt was scored for both"),
        ("reward", [-3.0] * 20, [-2.74] * 20, r"better than the base by 0\.260 in reward \(p = [\de.-]+\)"),
        ("reward", [4.0] * 20, [2.5] * 20, r"worse than the base by 1\.500 in reward"),
        (
            "reward",
            [1.5, 4.0] * 10,
            [4.0, 1.5] * 10,
            r"no difference from the base in reward could be shown: with 20 prompts, a true gain of \d+\.\d{3} "
            r"or more is detected 80% of the time",
        ),
        (
            "accuracy",
            [0.0] * 2,
            [0.0] * 2,
            "no difference from the base could be shown: 2 prompts cannot show any gain",
        ),
        ("accuracy", [0.0], [1.0], "no difference from the base could be shown: one prompt cannot show any gain"),
        ("reward", [1.0], [1.0], r".* with one prompt, .*"),
    ],
)
def test_the_verdict_says_what_the_figures_mean_in_the_metric_s_unit(
    metric: str, before: list[float], after: list[float], sentence: str
) -> None:
    bounds = (0.0, 1.0) if metric == "accuracy" else (-math.inf, math.inf)
    difference = vars(paired_difference(before, after, 0.95, bounds))
    assert re.fullmatch(sentence, verdict(metric, difference, "base", "prompts"))
