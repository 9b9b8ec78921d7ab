"""Rules of promotion that cannot be kept are named before the training, and the gate agrees."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from tasks.registry.feasible import impossible_rules, rules_beyond_size
from tasks.registry.gate import Contestant, decide
from tests.conftest import config_values

Z = 1.959964  # quantile of 0.975


def _config(folder: Path, **promotion: Any) -> RunConfig:
    return parse_config({**config_values(folder, folder), "promotion": promotion})


def _guard(**keys: Any) -> dict[str, Any]:
    return {"guards": [{"metric": "accuracy", **keys}]}


@pytest.mark.parametrize(
    ("bound", "prompts"),
    [
        (0.02, math.ceil(Z**2 * (1 / 0.02 - 1))),  # Tango's bound for no win and no loss is −z² / (N + z²)
        (0.1, math.ceil(Z**2 * (1 / 0.1 - 1))),
    ],
)
def test_a_fall_that_so_few_prompts_cannot_exclude_is_named_with_how_many_would_do(
    tmp_path: Path, bound: float, prompts: int
) -> None:
    config = _config(tmp_path, **_guard(max_drop=bound))
    (warning,) = rules_beyond_size(config, "accuracy", {"held-out": 20})
    assert "with 20 prompts, the interval reaches 0.161 even if no outcome changes" in warning
    assert warning.endswith(f"hold out {prompts} prompts")
    assert len([*rules_beyond_size(config, "accuracy", {"held-out": prompts - 1})]) == 1
    assert not [*rules_beyond_size(config, "accuracy", {"held-out": prompts})]


@pytest.mark.parametrize("size", [188, 189])
def test_the_gate_lets_an_equal_version_keep_the_guard_from_that_size_on(tmp_path: Path, size: int) -> None:
    config = _config(tmp_path, **_guard(max_drop=0.02))
    reward = config.rewards[0].name
    rows = {"set": ["held-out"] * size, "row": range(size), "sample": [0] * size, "prompt": [*map(str, range(size))]}
    samples = pl.DataFrame({**rows, f"base/rewards/{reward}": [1.0] * size, f"trained/rewards/{reward}": [1.0] * size})
    verdict = decide(config, Contestant("version 1", samples, "trained"), Contestant("the base", samples, "base"))
    is_named = bool([*rules_beyond_size(config, "accuracy", {"held-out": size})])
    assert ("max_drop 0.02 is broken" in verdict.reason) == is_named == (size < 189)


@pytest.mark.parametrize(
    ("promotion", "size", "said"),
    [
        ({}, 5, r"no version can be promoted: .* all 5 prompts .* Hold out 6 prompts or more"),
        ({}, 6, ""),
        (_guard(metric="kl", max_rise=0.1), 199, r"max_rise = 0.1 of kl .* no known range, .* Hold out 200 prompts"),
        (_guard(metric="kl", max_rise=0.1), 200, ""),
        (_guard(metric="completions/mean_length", max_rise=0.1), 50, r"max_rise = 0.1 of completions/mean_length"),
        (_guard(max_drop=0.0), 500, r"hold out more than 131,072 prompts"),
        (_guard(min=0.9), 6, ""),
        ({"min_gain": 1.5}, 6, r"min_gain = 1.5 cannot be reached if accuracy decides: accuracy is from 0 to 1"),
    ],
)
def test_each_rule_that_too_few_prompts_cannot_show_is_named(
    tmp_path: Path, promotion: dict[str, Any], size: int, said: str
) -> None:
    warnings = [*rules_beyond_size(_config(tmp_path, **promotion), "accuracy", {"held-out": size})]
    assert len(warnings) == bool(said)
    assert all(re.search(said, warning) for warning in warnings)


@pytest.mark.parametrize(
    ("promotion", "said"),
    [
        (_guard(min=1.2), "the guard min = 1.2: accuracy is from 0 to 1; lower it to 1 or less"),
        (_guard(max=-0.1), "the guard max = -0.1: accuracy is from 0 to 1; raise it to 0 or more"),
        (
            {"min_gain": 5.0, "metric": "accuracy"},
            "promotion.min_gain = 5: accuracy is from 0 to 1; lower it to 1 or less",
        ),
        ({"min_gain": 5.0}, "promotion.min_gain = 5: reward is from 0 to 1.5; lower it to 1.5 or less"),
        ({"min_gain": 1.2}, ""),  # the reward may decide
        ({"min_gain": 1.0, **_guard(min=1.0, max=0.0)}, ""),
        (_guard(metric="kl", min=9.0), ""),
    ],
)
def test_a_rule_that_no_figures_keep_is_refused(tmp_path: Path, promotion: dict[str, Any], said: str) -> None:
    assert [*impossible_rules(_config(tmp_path, **promotion))] == [said] * bool(said)
