"""Samples → a policy's outcome on each prompt, metric by metric. The unit of every statistic is the distinct prompt, or
the group of prompts that belong together (`evaluation.group_column`).

`samples` has a row for each completion that was drawn of each prompt (see `docs/reference/files.md`, samples.parquet).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set

import numpy as np
import polars as pl

from grpo_core.config.evaluation import HELD_OUT
from grpo_core.config.inputs import RewardConfig
from grpo_core.config.metrics import Deciding, evaluated_metric
from grpo_core.config.run import RunConfig
from grpo_core.data.units import number_equal
from grpo_core.evaluation.samples import GROUP
from grpo_core.evaluation.statistics import BINARY, Bounds, pass_at_k
from grpo_core.rewards.composition import range_of_sum, weighted_sum
from grpo_core.rewards.contract import range_of

PROMPT = ("task", "prompt")  # columns that tell prompts apart: the first that the samples have
AccuracyReward = str | Mapping[str, str]  # name of a reward; with several sources, the source → its reward's


def samples_of(samples: pl.DataFrame, set: str) -> pl.DataFrame:
    """The samples of an evaluation set, or, given the name of a source, those of its held-out prompts."""
    chosen = pl.col("set") == set
    if "source" in samples.columns:
        chosen |= (pl.col("set") == HELD_OUT) & (pl.col("source") == set)
    return samples.filter(chosen)


def outcomes(
    samples: pl.DataFrame,
    set: str,
    policy: str,
    metric: str,
    rewards: Sequence[RewardConfig],
    accuracy_reward: AccuracyReward,
    unscored_as: pl.Series | None = None,
) -> np.ndarray:
    """A policy's `metric` on each prompt of a set, in the order of rows: the mean over the prompt's samples. (N,)

    accuracy: 1 if `accuracy_reward` gave the sample 1, else 0. reward: the weighted sum of what `rewards` count.
    pass@K: the probability that one of K samples is right. kl: 0 for the base itself. The others are columns of
    `samples`. A sample that a reward left unscored is left out, a prompt without a scored one is NaN.
    unscored_as: one entry per row of the set, in the order of `samples`: a value that replaces the sample's own, or
    null. Raises ValueError for a metric or a policy that the samples do not have.
    """
    of_set = samples_of(samples, set)
    if (policy, metric) == ("base", "kl"):
        return np.zeros(of_set["row"].n_unique())
    if metric.startswith("pass@"):
        return _pass_at(int(metric.removeprefix("pass@")), of_set, right(policy, accuracy_reward))
    try:
        values = _of_samples(of_set, policy, metric, rewards, accuracy_reward)
    except pl.exceptions.ColumnNotFoundError as error:
        raise ValueError(f"the samples have no {metric!r} of the policy {policy!r}: no column {error}") from None
    if unscored_as is not None:
        values = unscored_as.zip_with(unscored_as.is_not_null(), values)
    means = of_set.select("row", it=values).group_by("row").agg(pl.col("it").mean())
    return means.sort("row")["it"].fill_null(np.nan).to_numpy()


def right(policy: str, accuracy_reward: AccuracyReward) -> pl.Expr:
    """Value of the reward that decides correctness: 1 if right, null if unscored."""
    if isinstance(accuracy_reward, str):
        return pl.col(f"{policy}/rewards/{accuracy_reward}").cast(pl.Float64)
    return pl.coalesce(
        pl.when(pl.col("source") == source).then(pl.col(f"{policy}/rewards/{name}").cast(pl.Float64))
        for source, name in accuracy_reward.items()
    )


def deciding_metric(samples: pl.DataFrame, accuracy_reward: AccuracyReward) -> Deciding:
    """Metric by which policies are compared if `promotion.metric` is not set: accuracy if `accuracy_reward` gave all
    samples, of every policy, 0 or 1, or did not score them; else reward, since its other values are not "wrong"."""
    policies = dict.fromkeys(name.partition("/")[0] for name in samples.columns if "/rewards/" in name)
    given = samples.select(right(policy, accuracy_reward).alias(policy) for policy in policies)
    return "accuracy" if all(column.drop_nulls().is_in([0.0, 1.0]).all() for column in given) else "reward"


def bounds_of(metric: str, config: RunConfig) -> Bounds:
    """Lowest and highest value that the metric of a prompt can have; infinite if nothing bounds it."""
    ranges = {f"rewards/{reward.name}/mean": range_of(reward) or (-math.inf, math.inf) for reward in config.rewards}
    ranges["reward"] = range_of_sum(config.rewards)
    ranges["completions/mean_length"] = 0.0, float(config.evaluation_length)
    ranges["conversations/mean_turns"] = 0.0, float(config.environment.max_turns)
    calls = 0.0, float(config.environment.max_tool_calls)
    ranges |= {"conversations/tool_calls": calls, "conversations/failed_tool_calls": calls}
    return ranges.get(metric, BINARY if evaluated_metric(metric).is_share else (0.0, math.inf))


def rewards_in(metric: str, config: RunConfig) -> list[str]:
    """Names of the rewards that the metric follows from."""
    if metric == "accuracy":
        return config.accuracy_rewards
    if metric == "reward":
        return [it.name for it in config.rewards if it.weight]
    return [it.name for it in config.rewards if metric == f"rewards/{it.name}/mean"]


def left_unscored(
    samples: pl.DataFrame, policy: str, others: pl.DataFrame, other: str, set: str, rewards: Sequence[str]
) -> pl.Series:
    """True if one of `rewards` left the policy's sample unscored, although it scored the other policy on that prompt:
    one value per row of the set, in the order of `samples`. `others` has the columns `other/…` of the other policy."""
    of_set, theirs = samples_of(samples, set), samples_of(others, set)
    lost = pl.repeat(False, of_set.height, eager=True)
    for name in rewards:
        scored = theirs.filter(pl.col(f"{other}/rewards/{name}").is_not_null())["row"].unique()
        lost |= of_set[f"{policy}/rewards/{name}"].is_null() & of_set["row"].is_in(scored.implode())
    return lost


def grouped(*tables: pl.DataFrame) -> pl.DataFrame:
    """Of several samples of the same prompts, the first that have groups; the first of all if none has. Some may have
    been evaluated before `evaluation.group_column` was set."""
    return next((samples for samples in tables if GROUP in samples.columns), tables[0])


def unit_name(samples: pl.DataFrame) -> str:
    """What is counted as one: "groups" of prompts if the samples have them, else "prompts"."""
    return "groups" if GROUP in samples.columns else "prompts"


def unit_numbers(samples: pl.DataFrame, set: str) -> np.ndarray:
    """Number of each row's unit, in the order of the set's rows: its group, else its prompt; equal ones have the same
    number. With an environment, prompts differ if anything that it begins with (`task`) does. (N,)"""
    return _numbers(samples, set, (GROUP, *PROMPT))


def prompt_numbers(samples: pl.DataFrame, set: str) -> np.ndarray:
    """Number of each row's prompt, whatever its group; see `unit_numbers`. (N,)"""
    return _numbers(samples, set, PROMPT)


def distinct_prompts(samples: pl.DataFrame, set: str) -> Set[str]:
    """The prompts of the set's samples, each as text."""
    column = next(name for name in PROMPT if name in samples.columns)
    return {*map(repr, samples_of(samples, set)[column])}


def _numbers(samples: pl.DataFrame, set: str, columns: Sequence[str]) -> np.ndarray:
    column = next(name for name in columns if name in samples.columns)
    return number_equal(samples_of(samples, set).filter(pl.col("sample") == 0).sort("row")[column].to_list())


def majority(
    samples: pl.DataFrame, set: str, policy: str, accuracy_reward: AccuracyReward, answer_pattern: str | None
) -> np.ndarray:
    """1 if the answer that most samples of a prompt give is right, else 0 (arXiv:2203.11171), by rows. (N,)

    The answer: the first group of `answer_pattern`'s last match, or without a pattern the completion without white
    space around it; a completion without a match casts no vote. Of equal counts the answer that came first wins. NaN
    if the winner's first sample was not scored; 0 if no sample has an answer.
    """
    columns = (f"{policy}/completion", right(policy, accuracy_reward).alias("right"))
    of_set = samples_of(samples, set).sort("row", "sample")
    per_prompt = of_set.group_by("row", maintain_order=True).agg(*columns)
    return np.array([_vote(zip(*drawn, strict=True), answer_pattern) for _, *drawn in per_prompt.rows()])


def _of_samples(
    samples: pl.DataFrame, policy: str, metric: str, rewards: Sequence[RewardConfig], accuracy_reward: AccuracyReward
) -> pl.Series:
    """Metric of each sample; null if it was not scored."""
    if metric == "accuracy":
        return samples.select((right(policy, accuracy_reward) == 1).cast(pl.Float64)).to_series()
    if metric == "reward":
        given = samples.select(pl.col(f"{policy}/rewards/{reward.name}").cast(pl.Float64) for reward in rewards)
        return pl.Series(weighted_sum(given.to_numpy(), rewards), nan_to_null=True)
    values = samples[f"{policy}/{evaluated_metric(metric).column}"]
    return (values != "" if values.dtype == pl.String else values).cast(pl.Float64)


def _pass_at(k: int, of_set: pl.DataFrame, scored: pl.Expr) -> np.ndarray:
    counts = of_set.group_by("row").agg(right=(scored == 1).sum(), scored=scored.count()).sort("row")
    counted = counts.select("right", "scored").rows()
    return np.array([pass_at_k(right, drawn, k) if drawn >= k else np.nan for right, drawn in counted])


def _vote(drawn: Iterable[tuple[str, float | None]], answer_pattern: str | None) -> float:
    answers = ((_answer(completion, answer_pattern), reward) for completion, reward in drawn)
    votes = [(answer, reward) for answer, reward in answers if answer is not None]
    if not votes:
        return 0.0
    [(winner, _)] = Counter(answer for answer, _ in votes).most_common(1)  # of equal counts, the first
    reward = next(reward for answer, reward in votes if answer == winner)
    return np.nan if reward is None else float(reward == 1)


def _answer(completion: str, pattern: str | None) -> str | None:
    if pattern is None:
        return completion.strip()
    matches = list(re.finditer(pattern, completion))
    return matches[-1].group(1) if matches else None
