"""From samples to one number a prompt, against plain loops; the report's figures."""

from __future__ import annotations

import itertools
import math
import random
import re
from typing import Any

import numpy as np
import polars as pl
import pytest

from grpo_core.config.files import parse_config
from grpo_core.config.inputs import RewardConfig
from grpo_core.config.metrics import EVALUATED, Metric, evaluated_metric
from grpo_core.config.run import RunConfig
from grpo_core.evaluation.comparison import compare_policies
from grpo_core.evaluation.outcomes import deciding_metric, majority, outcomes

WEIGHTS = {"right": 1.0, "style": 0.5}
REWARDS = [RewardConfig(function=name, weight=weight) for name, weight in WEIGHTS.items()]
PATTERN = r"=(\d)"
N = 5


def _samples(num_prompts: int = 12, seed: int = 0, n: int = N) -> pl.DataFrame:
    rng = random.Random(seed)
    rows = [
        {
            "set": name,
            "row": row,
            "sample": sample,
            "prompt": f"{name} {row}",
            "category": rng.choice(["odd", "even", None]) if sample == 0 else "not of the first sample",
            **{
                key: value
                for policy in ("base", "trained")
                for key, value in {
                    f"{policy}/completion": rng.choice(["=1", "=2 or =1", " =3", "none"]),
                    f"{policy}/completion_tokens": rng.randint(1, 9),
                    f"{policy}/truncated": rng.random() < 0.3,
                    f"{policy}/rewards/right": rng.choice([0.0, 0.5, 1.0, None]) if row else None,
                    f"{policy}/rewards/style": rng.choice([rng.random(), None]) if row > 1 else None,
                    f"{policy}/kl": rng.random(),
                }.items()
            },
        }
        for name, row, sample in itertools.product(("held-out", "hard"), range(num_prompts), range(n))
    ]
    return pl.DataFrame(rows, schema_overrides={"trained/rewards/style": pl.Float64, "base/rewards/right": pl.Float64})


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


def _weighted(rewards: dict[str, float | None]) -> float | None:
    if all(value is None for value in rewards.values()):
        return None
    return sum(WEIGHTS[name] * value for name, value in rewards.items() if value is not None)


def _by_hand(samples: pl.DataFrame, name: str, policy: str, metric: str) -> list[float]:
    found = []
    of_set = [row for row in samples.to_dicts() if row["set"] == name]
    for number in sorted({row["row"] for row in of_set}):
        drawn = [row for row in of_set if row["row"] == number]
        rewards = [{reward: row[f"{policy}/rewards/{reward}"] for reward in WEIGHTS} for row in drawn]
        found.append(
            _mean(
                {
                    "accuracy": [None if each["right"] is None else float(each["right"] == 1) for each in rewards],
                    "reward": [_weighted(each) for each in rewards],
                    "rewards/style/mean": [each["style"] for each in rewards],
                    "completions/mean_length": [row[f"{policy}/completion_tokens"] for row in drawn],
                    "completions/clipped_ratio": [float(row[f"{policy}/truncated"]) for row in drawn],
                    "kl": [row[f"{policy}/kl"] for row in drawn],
                }[metric]
            )
        )
    return found


METRICS = ["accuracy", "reward", "rewards/style/mean", "completions/mean_length", "completions/clipped_ratio", "kl"]


@pytest.mark.parametrize("metric", METRICS)
def test_an_outcome_is_the_mean_over_a_prompt_s_scored_samples_in_the_order_of_rows(metric: str) -> None:
    samples = _samples()
    shuffled = samples.sample(fraction=1, shuffle=True, seed=1)
    for name in ("held-out", "hard"):
        expected = _by_hand(samples, name, "trained", metric)
        found = outcomes(shuffled, name, "trained", metric, REWARDS, "right")
        assert found == pytest.approx(expected, nan_ok=True)
        assert np.isnan(found[0]) == (metric in ("accuracy", "reward", "rewards/style/mean")), "nothing scored row 0"


@pytest.mark.parametrize(
    ("base", "trained", "metric"),
    [
        ([0, 1, None], [1, 1, 0], "accuracy"),
        ([0, 0], [0, 0], "accuracy"),
        ([None, None], [None, None], "accuracy"),
        ([0, 1, 1], [0, 0.5, 1], "reward"),
        ([-4.0, -2.0], [-1.0, 0.0], "reward"),
        ([0.5, 1], [1, 1], "reward"),
    ],
)
def test_policies_are_compared_by_accuracy_where_a_reward_says_nothing_but_right_or_wrong(
    base: list[float | None], trained: list[float | None], metric: str
) -> None:
    values = {"base/rewards/right": base, "trained/rewards/right": trained, "trained/rewards/style": [0.3] * len(base)}
    assert deciding_metric(pl.DataFrame(values, strict=False), "right") == metric


def test_pass_at_k_of_a_prompt_is_that_of_all_subsets_of_its_samples() -> None:
    samples = _samples().with_columns(pl.col("trained/rewards/right").fill_null(0.0))
    for k in range(1, N + 1):
        found = outcomes(samples, "hard", "trained", f"pass@{k}", REWARDS, "right")
        drawn = samples.filter(set="hard").group_by("row", maintain_order=True).agg("trained/rewards/right")
        for value, (_, rewards) in zip(found, drawn.rows(), strict=True):
            subsets = list(itertools.combinations(rewards, k))
            assert value == pytest.approx(sum(1.0 in subset for subset in subsets) / len(subsets))


@pytest.mark.parametrize("pattern", [None, PATTERN])
def test_the_majority_s_answer_is_the_most_frequent_one_the_first_of_equals(pattern: str | None) -> None:
    samples = _samples(60, n=4)
    expected = []
    for row in range(60):
        drawn = samples.filter(set="hard", row=row).sort("sample")
        texts, rewards = drawn["trained/completion"].to_list(), drawn["trained/rewards/right"].to_list()
        answers = [
            text.strip() if pattern is None else (re.findall(pattern, text) or [None])[-1] for text in texts
        ]  # all of them have a last match or none
        given = [answer for answer in answers if answer is not None]
        if not given:
            expected.append(0.0)
            continue
        most = max(given.count(answer) for answer in given)
        first = next(i for i, answer in enumerate(answers) if answer is not None and given.count(answer) == most)
        expected.append(math.nan if rewards[first] is None else float(rewards[first] == 1))
    found = majority(samples.sample(fraction=1, shuffle=True, seed=2), "hard", "trained", "right", pattern)
    assert found == pytest.approx(expected, nan_ok=True)
    assert {0.0, 1.0} < set(found)


def test_the_base_is_no_distance_from_itself() -> None:
    assert outcomes(_samples(), "hard", "base", "kl", REWARDS, "right").tolist() == [0.0] * 12


@pytest.mark.parametrize(("policy", "metric"), [("champion", "accuracy"), ("trained", "rewards/tone/mean")])
def test_what_the_samples_do_not_have_is_named(policy: str, metric: str) -> None:
    with pytest.raises(ValueError, match=f"no '{metric}' of the policy '{policy}'"):
        outcomes(_samples(), "hard", policy, metric, REWARDS, "right")


def _config(**evaluation: Any) -> RunConfig:
    return parse_config(
        {
            "name": "test",
            "model": {"name_or_path": "model"},
            "data": {"train": "train.parquet", "eval": "eval.parquet"},
            "rewards": [{"function": "graders:right"}, {"function": "graders:style", "weight": 0.5}],
            "evaluation": {
                "sets": [{"name": "hard", "data": "hard.parquet"}],
                "num_samples": N,
                "temperature": 0.7,
                **evaluation,
            },
        }
    )


@pytest.mark.slow
def test_the_report_has_each_policy_s_figures_and_what_the_last_gains_on_each_other() -> None:
    samples = _samples()
    sets = compare_policies(samples, _config(), ["base", "trained"])
    assert [*sets] == ["held-out", "hard"]
    policies, (difference,) = sets["hard"]["policies"], sets["hard"]["differences"].values()
    assert [m for m in policies["trained"] if m.startswith("pass@")] == ["pass@1", "pass@2", "pass@4", "pass@5"]
    assert policies["trained"]["pass@1"]["mean"] == pytest.approx(policies["trained"]["accuracy"]["mean"])
    assert {*policies["trained"]} - {*policies["base"]} == {"kl"}
    before, after = (np.array(_by_hand(samples, "hard", policy, "accuracy")) for policy in ("base", "trained"))
    assert policies["trained"]["accuracy"]["mean"] == pytest.approx(np.nanmean(after))
    assert policies["trained"]["accuracy"]["num_units"] == 11, "row 0 was not scored"
    assert difference["accuracy"]["mean"] == pytest.approx(np.nanmean(after - before))
    assert difference["kl"]["mean"] == policies["trained"]["kl"]["mean"]


@pytest.mark.slow
def test_a_metric_added_to_the_table_is_evaluated_may_be_guarded_and_has_a_heading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(EVALUATED, "pauses", Metric("pauses", "pauses", "seconds", column="pauses"))
    samples = _samples().with_columns(**{f"{policy}/pauses": pl.lit(0.5) for policy in ("base", "trained")})
    figures = compare_policies(samples, _config(), ["base", "trained"])["hard"]["policies"]["trained"]
    assert figures["pauses"]["mean"] == 0.5
    assert {evaluated_metric(name).heading for name in figures} >= {"pauses, seconds", "style", "pass@2", "cut off"}
    guard = {"metric": "pauses", "max_rise": 0.1}
    values = _config().model_dump(exclude_none=True) | {"promotion": {"guards": [guard]}}
    assert parse_config(values).promotion.guards[0].metric == "pauses"


@pytest.mark.slow
def test_a_penalty_that_is_always_0_is_no_share_of_right_answers() -> None:
    fined = pl.when(pl.col("row") % 2 == 0).then(-0.5).otherwise(0.0)
    samples = _samples().with_columns(fined.alias("base/rewards/style"), pl.lit(0.0).alias("trained/rewards/style"))
    policies = compare_policies(samples, _config(), ["base", "trained"])["hard"]["policies"]
    penalty = policies["trained"]["rewards/style/mean"]
    assert penalty["low"] < penalty["high"] == 0.0, "nothing is above 0"


@pytest.mark.slow
def test_a_category_s_figures_are_those_of_its_prompts() -> None:
    samples = _samples()
    categories = compare_policies(samples, _config(), ["base", "trained"])["hard"]["categories"]
    assert [*categories] == ["even", "odd"]
    of = samples.filter(set="hard", sample=0).sort("row")["category"].to_list()
    values = np.array(_by_hand(samples, "hard", "trained", "reward"))
    for category, figures in categories.items():
        chosen = values[[each == category for each in of]]
        assert figures["num_prompts"] == len(chosen)
        assert figures["policies"]["trained"]["reward"]["mean"] == pytest.approx(np.nanmean(chosen))
    assert "categories" not in compare_policies(samples.drop("category"), _config(), ["base", "trained"])["hard"]
