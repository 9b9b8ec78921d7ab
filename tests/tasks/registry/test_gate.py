"""The gate as a whole, on simulated evaluations: how often it errs, what it finds, what a guard lets through; and rules
that cannot be kept, which are named before the training."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from scipy.stats import binom

from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from grpo_core.evaluation.statistics import POWER
from tasks.registry.feasible import impossible_rules, rules_beyond_size
from tasks.registry.gate import Contestant, NotComparableError, Verdict, decide, level_of, refuse_chosen_there
from tests.conftest import config_values
from tests.evaluations import fixed_samples, promotion_config, simulated_samples
from tests.made_up import outcomes_of, samples_of, values_of, with_conversations

TRIALS = 150
GUARDS = [
    {"set": "general", "metric": "accuracy", "max_drop": 0.3},
    {"metric": "completions/mean_length", "max_rise": 15},
]


def test_an_arm_is_not_judged_on_a_source_of_the_prompts_by_which_it_was_chosen() -> None:
    samples = pl.DataFrame({"set": ["held-out"] * 2, "source": ["maths", "code"], "prompt": ["1+1", "def"]})
    plain = values_of("mixed", registry={"sweep": "mixed.sweep"})
    sources = [{"name": name, "train": name, "eval": f"{name}-eval"} for name in ("maths", "code")]
    for name in ("maths", "code", "held-out"):
        config = parse_config({**plain, "data": {"sources": sources}, "promotion": {"set": name}})
        with pytest.raises(NotComparableError, match=f"prompts of '{name}' are among those"):
            refuse_chosen_there(config, samples)


def _decide(config: RunConfig, samples: pl.DataFrame, rival: str = "champion") -> Verdict:
    return decide(config, Contestant("version 2", samples, "trained"), Contestant("version 1", samples, rival))


def _trials(config: RunConfig, gain: dict[str, float], trials: int = TRIALS, **simulated: Any) -> list[Verdict]:
    gains = {"champion": {}, "trained": gain}
    return [_decide(config, simulated_samples(seed, gains, **simulated)) for seed in range(trials)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "confidence", "num_samples"),
    [
        ("accuracy", 0.95, 1),
        pytest.param("accuracy", 0.9, 4, marks=pytest.mark.e2e),
        pytest.param("reward", 0.8, 1, marks=pytest.mark.e2e),
    ],
)
def test_the_same_policy_twice_is_promoted_no_more_often_than_stated(
    metric: str, confidence: float, num_samples: int
) -> None:
    """Without guards, which would only refuse more."""
    config = promotion_config(metric=metric, confidence=confidence)
    promoted = sum(verdict.accepted for verdict in _trials(config, {}, num_samples=num_samples))
    # What a gate that errs exactly as often as stated exceeds in one of a hundred such series.
    assert promoted <= binom.ppf(0.99, TRIALS, 1 - confidence)


@pytest.mark.e2e
def test_a_difference_that_is_said_to_be_detectable_is_found_with_the_stated_power() -> None:
    unguarded, guarded = promotion_config(), promotion_config(guards=GUARDS)
    stated = [verdict.comparisons[0].difference.minimum_detectable for verdict in _trials(unguarded, {}, trials=50)]
    found = sum(verdict.accepted for verdict in _trials(guarded, {"held-out": float(np.mean(stated))}))
    assert binom.ppf(0.01, TRIALS, POWER) <= found <= binom.ppf(0.99, TRIALS, POWER + 0.1)


@pytest.mark.slow
def test_a_guard_lets_through_few_that_lose_as_much_as_it_allows() -> None:
    loses = {"held-out": 0.4, "general": -0.1}
    config = promotion_config(guards=[{"set": "general", "metric": "accuracy", "max_drop": 0.1}])
    guarded, unguarded = _trials(config, loses, trials=100), _trials(promotion_config(), loses, trials=10)
    assert sum(verdict.accepted for verdict in guarded) <= binom.ppf(0.99, 100, 1 - config.promotion.confidence)
    assert all(verdict.comparisons[0].broken is None for verdict in guarded)
    assert all(verdict.accepted for verdict in unguarded)


def test_the_line_between_promoted_and_refused_is_the_exact_sign_tests() -> None:
    """Six wins of six happen by chance with probability 1/64, five of five with 1/32; half of 0.05 goes to the first
    attempt."""
    for wins, p_value, accepted in [(6, 1 / 64, True), (5, 1 / 32, False)]:
        samples = fixed_samples({"champion": [0] * 10, "trained": [1] * wins + [0] * (10 - wins)})
        verdict = _decide(promotion_config(), samples)
        assert (verdict.accepted, verdict.comparisons[0].difference.p_value) == (accepted, pytest.approx(p_value))
    assert verdict.reason.endswith(" (attempt 1 against version 1, so at level 0.025)")
    assert _decide(promotion_config(confidence=0.9), samples).accepted


def test_each_attempt_against_the_same_rival_has_less_to_spend_and_all_together_no_more_than_stated() -> None:
    samples = fixed_samples({"champion": [0] * 10, "trained": [1] * 8 + [0] * 2})  # p = 1/256
    accepted = [
        decide(
            promotion_config(), Contestant("2", samples, "trained"), Contestant("1", samples, "champion"), attempt
        ).accepted
        for attempt in range(1, 6)
    ]
    assert accepted == [True, True, True, False, False]  # levels 1/40, 1/120, 1/240, 1/400, 1/600
    spent = np.cumsum([level_of(attempt, 0.95) for attempt in range(1, 10_000)])
    assert spent[-1] == pytest.approx(0.05, rel=1e-3) and (spent < 0.05).all()


def test_many_candidates_that_are_no_better_promote_none_more_often_than_stated() -> None:
    """Thirty nights against one champion, each with other sampling luck; at a fixed level four in five series would
    promote one."""
    rng, series, prompts = np.random.default_rng(8), 300, 200

    @functools.cache  # other series come to the same
    def is_accepted(won: int, attempt: int) -> bool:
        samples = fixed_samples(
            {
                "champion": [0] * won + [1] * (prompts - won),
                "trained": [1] * won + [0] * (40 - won) + [1] * (prompts - 40),
            }
        )
        contestants = Contestant("2", samples, "trained"), Contestant("1", samples, "champion")
        return decide(promotion_config(), *contestants, attempt).accepted

    lucky = 0
    for _ in range(series):
        wins = rng.binomial(40, 0.5, 30)  # of 40 prompts on which the two differ, in each of 30 nights
        p_values = binom.sf(wins - 1, 40, 0.5)
        night = int(np.argmin(p_values / [level_of(attempt, 0.95) for attempt in range(1, 31)]))
        lucky += is_accepted(int(wins[night]), night + 1)
    assert lucky <= binom.ppf(0.999, series, 0.05)


def test_a_gain_smaller_than_what_is_worth_a_promotion_is_refused() -> None:
    samples = fixed_samples({"champion": [0] * 10 + [1] * 10, "trained": [1] * 6 + [0] * 4 + [1] * 10})
    assert _decide(promotion_config(min_gain=0.3), samples).accepted
    verdict = _decide(promotion_config(min_gain=0.31), samples)
    assert not verdict.accepted
    assert verdict.reason.startswith(
        "accuracy on held-out 80.0% against 50.0% of version 1, +30.0 points (95% interval "
    )
    assert verdict.reason.endswith(
        "): better, but min_gain asks for 31.0 points (attempt 1 against version 1, so at level 0.025)"
    )


@pytest.mark.parametrize(
    ("guard", "kept"),
    [
        ({"metric": "kl", "max": 0.25}, True),
        ({"metric": "kl", "max": 0.24}, False),
        ({"metric": "kl", "max_rise": 0.25}, True),  # of the base itself it is 0
        ({"metric": "kl", "max_rise": 0.24}, False),
        ({"metric": "accuracy", "min": 1}, True),
        ({"metric": "completions/mean_length", "max_drop": 4.7}, True),  # 1.83 % of 256 tokens
        ({"metric": "completions/mean_length", "max_drop": 4.6}, False),
        ({"metric": "completions/clipped_ratio", "max": 0, "max_rise": 0.02}, True),
        ({"metric": "completions/clipped_ratio", "max": 0, "max_rise": 0}, False),
        ({"metric": "rewards/length/mean", "min": 0.1, "max": 1}, False),
        ({"set": "general", "metric": "accuracy", "min": 0}, False),  # nothing is known of that set
    ],
)
def test_every_guard_is_a_condition_of_its_own(guard: dict[str, Any], kept: bool) -> None:
    samples = fixed_samples({"base": [0] * 200, "trained": [1] * 200})
    verdict = _decide(promotion_config(guards=[{"metric": "reward", "min": 0}, guard]), samples, rival="base")
    assert verdict.accepted == kept
    assert [comparison.broken is None for comparison in verdict.comparisons] == [True, True, kept]
    assert kept or f"the guard {verdict.comparisons[2].rule.split(',')[0]} is broken: " in verdict.reason


@pytest.mark.parametrize("metric", ["accuracy", "reward", "completions/mean_length", "completions/clipped_ratio", "kl"])
def test_equal_outcomes_on_ten_prompts_do_not_show_that_nothing_is_worse(metric: str) -> None:
    """Where 30 % of all prompts had got worse, ten of them would still all be equal once in 35 times."""
    samples = fixed_samples({"champion": [0] * 10 + [1] * 10, "trained": [1] * 10 + [1] * 10})
    general = samples.filter(pl.col("row") >= 10).with_columns(set=pl.lit("general"))
    guard = {"set": "general", "metric": metric, "max_drop": 0.0}
    verdict = _decide(promotion_config(guards=[guard]), pl.concat([samples, general]))
    assert not verdict.accepted
    assert [comparison.broken is None for comparison in verdict.comparisons] == [True, False]


def test_answers_that_only_the_candidate_left_unscored_count_as_wrong() -> None:
    base = [1] * 30 + [0] * 10
    samples = fixed_samples({"base": base, "trained": [1] * 18 + [None] * 22})
    verdict = _decide(promotion_config(), samples, rival="base")
    assert not verdict.accepted
    assert verdict.comparisons[0].difference.mean == pytest.approx((18 - 30) / 40)
    assert verdict.reason.startswith(
        "accuracy on held-out 45.0% against 75.0% of version 1, -30.0 points (95% interval "
    )
    assert "), with 22 prompts counted as the worst because only version 1 was scored there: " in verdict.reason
    for metric, bound in [("reward", {"max_drop": 0.2}), ("rewards/numeric_match/mean", {"max_rise": 0.5, "max": 0.9})]:
        guard = _decide(promotion_config(guards=[{"metric": metric, **bound}]), samples, rival="base").comparisons[1]
        assert guard.broken


def test_prompts_on_which_the_rival_was_not_scored_are_left_out_of_all_figures() -> None:
    samples = fixed_samples({"champion": [None] * 4 + [0] * 24 + [1] * 12, "trained": [0] * 4 + [1] * 36})
    verdict = _decide(promotion_config(), samples)
    assert verdict.accepted
    assert verdict.reason.startswith("accuracy on held-out 100.0% against 33.3% of version 1, +66.7 points (95% ")
    assert ") on 36 of 40 prompts: better, p = " in verdict.reason
    nothing = fixed_samples({"champion": [None] * 10, "trained": [1] * 10})
    reason = _decide(promotion_config(), nothing).reason
    assert "no prompt was scored by both" in reason
    assert "interval" not in reason


def test_prompts_most_of_which_were_not_scored_of_the_rival_decide_nothing() -> None:
    samples = fixed_samples({"champion": [0] * 6 + [None] * 494, "trained": [1] * 6 + [0] * 494})
    verdict = _decide(promotion_config(), samples)
    assert not verdict.accepted
    assert "scored for both on only 6 of 500 prompts, and a decision needs 90% of them" in verdict.reason
    assert "grpo stage evaluate --run RUN --force" in verdict.reason
    guards = [{"metric": "rewards/numeric_match/mean", "min": 0.5}]
    guarded = _decide(promotion_config(metric="reward", guards=guards), samples)
    assert guarded.comparisons[1].broken and "prompts, and a decision needs" in guarded.comparisons[1].broken


def test_a_reward_that_does_not_count_leaves_nothing_unscored() -> None:
    config = promotion_config({"function": "numeric_match"}, {"function": "length", "weight": 0}, metric="reward")
    samples = fixed_samples({"champion": [0] * 40, "trained": [1] * 40})
    unscored = samples.with_columns(pl.lit(None, pl.Float64).alias("trained/rewards/length"))
    verdict = _decide(config, unscored)
    assert verdict.accepted and verdict.comparisons[0].num_unscored == 0
    assert verdict.comparisons[0].difference == _decide(config, samples).comparisons[0].difference


def test_prompts_of_a_group_count_once() -> None:
    """30 of 60 prompts are won, none lost: those of three groups of twelve."""
    right = {"champion": [0] * 60, "trained": [int(row % 12 < 3) for row in range(60)]}
    samples = fixed_samples(right)
    assert _decide(promotion_config(), samples).accepted
    verdict = _decide(promotion_config(), samples.with_columns(group=pl.format("passage {}", pl.col("row") % 12)))
    of_groups = _decide(promotion_config(), fixed_samples({policy: of[:12] for policy, of in right.items()}))
    assert not verdict.accepted
    assert verdict.comparisons[0].difference == of_groups.comparisons[0].difference
    assert "with 12 groups, a true gain of" in verdict.reason


def test_prompts_that_only_one_policy_was_scored_on_do_not_decide_within_a_group() -> None:
    """The champion was scored on the one hard prompt of each group, and the candidate is right on the others only."""
    hard = [row % 5 == 0 for row in range(100)]
    samples = fixed_samples({"champion": [0 if it else None for it in hard], "trained": [int(not it) for it in hard]})
    verdict = _decide(promotion_config(), samples.with_columns(group=pl.col("row") // 5))
    assert verdict.comparisons[0].difference.mean == 0
    assert "was scored for both on only 20 of 100 prompts" in verdict.reason


def test_a_prompt_that_comes_twice_counts_once() -> None:
    samples = fixed_samples({"champion": [0] * 10, "trained": [1] * 6 + [0] * 4})
    twice = samples.with_columns(prompt=pl.format("prompt {}", pl.col("row") // 2))
    assert _decide(promotion_config(), samples).accepted
    verdict = _decide(promotion_config(), twice)
    assert not verdict.accepted
    assert (verdict.comparisons[0].num_prompts, verdict.comparisons[0].difference.num_units) == (5, 5)
    assert verdict.comparisons[0].difference.p_value == pytest.approx(1 / 8)  # three of three


def test_a_reward_without_a_range_decides_nothing_on_few_prompts() -> None:
    unbounded = {"function": "char_length", "name": "length"}
    config = promotion_config({"function": "numeric_match"}, unbounded, metric="reward")
    for prompts, accepted in [(199, False), (200, True)]:
        verdict = _decide(config, fixed_samples({"champion": [0] * prompts, "trained": [1] * prompts}))
        assert verdict.accepted == accepted
    few = _decide(config, fixed_samples({"champion": [0] * 50, "trained": [1] * 50}))
    assert "reward has no bounds, and 50 prompts are too few" in few.reason
    bounded = promotion_config(metric="reward")
    assert _decide(bounded, fixed_samples({"champion": [0] * 50, "trained": [1] * 50})).accepted


def test_a_version_with_better_grades_is_promoted_though_none_is_a_right_answer() -> None:
    """The reward of TRL's first example: never 1, so that no answer is right."""
    samples = fixed_samples({"champion": [-3.0] * 200, "trained": [-2.0] * 200})
    grades = {"function": "char_length", "name": "numeric_match"}
    verdict = _decide(promotion_config(grades), samples)
    assert verdict.accepted and verdict.comparisons[0].metric == "reward"
    assert not _decide(promotion_config(grades, metric="accuracy"), samples).accepted


def test_a_refusal_says_what_would_have_been_found() -> None:
    samples = simulated_samples(0, {"champion": {}, "trained": {}}, num_prompts=100)
    verdict = _decide(promotion_config(), samples)
    detectable = 100 * verdict.comparisons[0].difference.minimum_detectable
    assert (
        f"with 100 prompts, a true gain of {detectable:.1f} points or more is detected 80% of the time)"
        in verdict.reason
    )


def test_the_gate_judges_conversations_and_its_guards_know_their_turns_and_failures() -> None:
    samples = with_conversations(samples_of({"base": outcomes_of(0, 0.3), "trained": outcomes_of(1, 0.9)}))
    guards = [
        {"metric": "conversations/mean_turns", "max_rise": 1.0},
        {"metric": "conversations/failed_tool_calls", "max": 1.0},
        {"metric": "conversations/failed", "max": 0.05},
    ]

    def verdict(count: int) -> Verdict:
        values = values_of("talks", environment={"tools": ["calculator"]}, promotion={"guards": guards[:count]})
        return _decide(parse_config(values), samples, rival="base")

    assert verdict(2).accepted, verdict(2).reason
    assert not verdict(3).accepted
    assert "conversations/failed" in verdict(3).reason and "10.0%" in verdict(3).reason
    with pytest.raises(ConfigError, match="'conversations/mean_turns' is not among"):
        parse_config(values_of("alone", promotion={"guards": guards}))


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
