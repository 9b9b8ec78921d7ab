"""The table of metrics: label on pages, unit, whether more is better, and where each is recorded.

A new metric is one line here. Its value comes from the evaluation (samples.parquet) or the training (metrics.jsonl).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Unit = Literal["share", "tokens", "nats per token", "seconds", ""]
Deciding = Literal["accuracy", "reward"]  # what policies can be compared by
DECIDING: tuple[Deciding, ...] = get_args(Deciding)


@dataclass(frozen=True)
class Metric:
    """A metric. `column`: its column in samples.parquet, after `POLICY/`; None if it follows from the columns of
    rewards. A text column says what failed, and is empty otherwise. `of_conversations`: only with tools or an
    environment."""

    name: str
    label: str
    unit: Unit = ""
    more_is_better: bool = False  # False also if neither direction is better, as for lengths and KL
    column: str | None = None
    of_conversations: bool = False

    @property
    def is_share(self) -> bool:
        """True for a share, from 0 to 1: shown in per cent, and a difference of two in points."""
        return self.unit == "share"

    @property
    def scale(self) -> int:
        """Factor by which a value is multiplied to be drawn."""
        return 100 if self.is_share else 1

    @property
    def heading(self) -> str:
        """Label and unit, for a table whose cells have the percent sign."""
        return f"{self.label}, {self.unit}" if self.unit and not self.is_share else self.label

    @property
    def title(self) -> str:
        """Label and unit, for a chart."""
        title = f"{self.label}, %" if self.is_share else self.heading
        return title[0].upper() + title[1:]


def _by_name(metrics: Iterable[Metric]) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics}


# An evaluation's figures, in the order of its tables; promotion.guards may name them.
EVALUATED = _by_name(
    [
        Metric("accuracy", "accuracy", "share", more_is_better=True),
        Metric("reward", "reward", more_is_better=True),
        Metric("completions/mean_length", "completion length", "tokens", column="completion_tokens"),
        Metric("completions/clipped_ratio", "cut off", "share", column="truncated"),
        Metric("conversations/mean_turns", "turns", column="turns", of_conversations=True),
        Metric("conversations/tool_calls", "tool calls", column="tool_calls", of_conversations=True),
        Metric("conversations/failed_tool_calls", "failed calls", column="failed_tool_calls", of_conversations=True),
        Metric(
            "conversations/failed", "failed environments", "share", column="environment_failure", of_conversations=True
        ),
        Metric("kl", "KL to the base", "nats per token", column="kl"),
    ]
)

# A training's figures, one value per update; docs/reference/metrics.md has all of them, these are those with a chart.
TRAINED = _by_name(
    [
        Metric("reward", "reward", more_is_better=True),
        Metric("eval_reward", "reward on held-out prompts", more_is_better=True),
        Metric("eval_accuracy", "accuracy on held-out prompts", "share", more_is_better=True),
        Metric("completions/mean_length", "completion length", "tokens"),
        Metric("completions/clipped_ratio", "completions cut off", "share"),
        Metric("conversations/mean_turns", "turns of a conversation"),
        Metric("conversations/tool_calls", "tool calls of a conversation"),
        Metric("conversations/failed", "failed conversations", "share"),
        Metric("conversations/environment_seconds", "waiting for tools, per conversation", "seconds"),
        Metric("conversations/environment_share", "tokens of the environment", "share"),
        Metric("frac_reward_zero_std", "groups without signal", "share"),
        Metric("entropy", "entropy", "nats per token"),
        Metric("kl", "KL to the reference", "nats per token"),
        Metric("teacher_kl", "reverse KL to the teacher", "nats per token"),
        Metric("teacher_divergence", "divergence from the teacher", "nats per token"),
        Metric("privileged_gap", "what the shown text tells", "nats per token"),
        Metric("teacher_shown", "completions that a teacher teaches", "share"),
        Metric("grad_norm", "gradient norm"),
        Metric("learning_rate", "learning rate"),
        Metric("step_time", "time per update", "seconds"),
    ]
)


# Figures of a training that are also given per source, as METRIC/SOURCE, if there are several; with eval_ too.
BY_SOURCE = (
    *("reward", "frac_reward_zero_std", "frac_unscored"),
    *("completions/mean_length", "completions/clipped_ratio", "accuracy"),
)


def of_source(metrics: Mapping[str, float], source: str) -> dict[str, float]:
    """The figures of BY_SOURCE among `metrics` that are finite, under their names for a source."""
    return {
        f"{name}/{source}": value
        for name, value in metrics.items()
        if name.removeprefix("eval_") in BY_SOURCE and math.isfinite(value)
    }


def evaluated_metrics(conversations: bool) -> list[str]:
    """Names of the metrics of EVALUATED; `conversations`: true with tools or an environment."""
    return [name for name, metric in EVALUATED.items() if conversations or not metric.of_conversations]


def evaluated_metric(name: str) -> Metric:
    """A metric of an evaluation by its name: of EVALUATED, or rewards/NAME/mean, pass@K or majority@N."""
    if name in EVALUATED:
        return EVALUATED[name]
    if name.startswith("rewards/"):
        column = name.removesuffix("/mean")
        return Metric(name, column.removeprefix("rewards/"), more_is_better=True, column=column)
    if name.startswith(("pass@", "majority@")):
        return Metric(name, name, "share", more_is_better=True)
    raise ValueError(f"no metric of an evaluation is called {name!r}")


def reward_means(rewards: Iterable[str]) -> list[str]:
    """Names of the metrics that are the means of these rewards."""
    return [f"rewards/{name}/mean" for name in rewards]
