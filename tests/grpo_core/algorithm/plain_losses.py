"""Each loss in plain floats, written from docs/reference/algorithm.md: tests hold the tensors' losses against it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_core.config.algorithm import AlgorithmConfig


@dataclass(frozen=True)
class Token:
    """A token of a completion. Through `fixed_ratio` and `weight` no gradient flows."""

    advantage: float
    logprob: float
    ratio: float
    fixed_ratio: float
    weight: float  # of the whole completion against the engine that sampled it


@dataclass(frozen=True)
class Cut:
    """Where a completion is in its update."""

    length: int
    tokens: int  # of the micro-step of its process
    rows: int  # of the micro-step of its process
    micro_steps: int
    rollout_tokens: int
    steps_per_generation: int
    processes: int
    limit: int  # max_completion_length


@dataclass(frozen=True)
class PlainLoss:
    term: Callable[[AlgorithmConfig, Token], float]
    divisor: Callable[[Cut], float]
    needs: Mapping[str, Any] = field(default_factory=dict)
    """Keys without which a configuration with this loss is refused."""
    drawn: Mapping[str, Collection[Any]] = field(default_factory=dict)
    """Keys that it reads, each with values to draw from."""
    metrics: frozenset[str] = frozenset()
    """Metrics that it alone has."""
    holds_correction: bool = False


def _clipped(c: AlgorithmConfig, t: Token) -> float:
    above = 1 + (c.epsilon if c.epsilon_high is None else c.epsilon_high)
    bounded = t.ratio if c.delta is None or t.ratio < c.delta else c.delta
    return -min(bounded * t.advantage, min(max(t.ratio, 1 - c.epsilon), above) * t.advantage)


def _cispo(c: AlgorithmConfig, t: Token) -> float:
    assert c.epsilon_high is not None
    return -min(t.fixed_ratio, c.epsilon_high) * t.advantage * t.logprob


def _sapo(c: AlgorithmConfig, t: Token) -> float:
    tau = c.sapo_temperature_pos if t.advantage > 0 else c.sapo_temperature_neg
    return -4 / tau / (1 + math.exp(-tau * (t.ratio - 1))) * t.advantage


def _vespo(c: AlgorithmConfig, t: Token) -> float:
    positive = t.advantage >= 0
    k, decay = (c.vespo_k_pos, c.vespo_lambda_pos) if positive else (c.vespo_k_neg, c.vespo_lambda_neg)
    w = min(max(t.weight, 1e-8), math.exp(20))
    return -(w**k) * math.exp(max(decay, 1e-4) * (1 - w)) * t.advantage * t.logprob


def _completion(cut: Cut) -> float:
    return max(cut.length, 1) * cut.rows * cut.micro_steps


def _micro_step(cut: Cut) -> float:
    return max(cut.tokens, 1) * cut.micro_steps


def _longest(cut: Cut) -> float:
    return cut.rows * cut.limit * cut.micro_steps


def _generation_batch(cut: Cut) -> float:
    return cut.rollout_tokens / cut.processes * cut.micro_steps / cut.steps_per_generation


def _completions(cut: Cut) -> float:
    return cut.rows * cut.micro_steps


CLIPPED: dict[str, Any] = {
    "drawn": {"delta": [None, 1.5]},
    "metrics": frozenset({"clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"}),
}
LEVEL, MODE = "importance_sampling_level", "vllm_importance_sampling_mode"
PLAIN_LOSSES: dict[str, PlainLoss] = {
    "grpo": PlainLoss(_clipped, _completion, **CLIPPED),
    "bnpo": PlainLoss(_clipped, _micro_step, **CLIPPED),
    "dr_grpo": PlainLoss(_clipped, _longest, **CLIPPED),
    "dapo": PlainLoss(_clipped, _generation_batch, **CLIPPED),
    "luspo": PlainLoss(_clipped, _completions, needs={LEVEL: "sequence"}, **CLIPPED),
    "cispo": PlainLoss(
        _cispo,
        _generation_batch,
        needs={"epsilon_high": 5.0},
        drawn={"epsilon_high": [0.9, 1.5]},
        metrics=frozenset({"cispo_clip_ratio"}),
    ),
    "sapo": PlainLoss(_sapo, _completion, drawn={"sapo_temperature_pos": [1.0, 2.0]}),
    "vespo": PlainLoss(
        _vespo,
        _generation_batch,
        needs={LEVEL: "token", MODE: "token_truncate"},
        drawn={MODE: ["token_truncate", "token_mask"], "vespo_k_pos": [0.1, 2.0], "vespo_lambda_neg": [0.0, 2.0]},
        metrics=frozenset({"vespo/phi_seq_mean"}),
        holds_correction=True,
    ),
}


def plain(loss_type: str) -> PlainLoss:
    assert loss_type in PLAIN_LOSSES, f"enter {loss_type} in PLAIN_LOSSES, {__name__}"
    return PLAIN_LOSSES[loss_type]


@dataclass(frozen=True)
class PlainRow:
    """A completion's trained tokens, and what its loss reads."""

    config: AlgorithmConfig
    advantage: float
    fixed: list[float]  # log-probabilities as they are, where no gradient flows
    old: list[float]
    reference: list[float]
    keep: list[float]
    engine: list[float] | None
    teacher: list[float] | None = None
    teacher_weight: float = 1.0

    def loss(self, lp: list[float]) -> float:
        """Sum of the tokens' losses with these log-probabilities."""
        c, n, fixed, old, ref = (
            self.config,
            len(self.old),
            self.fixed,
            self.old,
            self.reference,
        )
        engine = self.engine if c.vllm_importance_sampling_correction else None
        weight = math.exp(sum(fixed[u] - old[u] for u in range(n)))
        for u in range(n):
            weight *= max(_correction(c, old[u] - engine[u]), 1e-8) if engine else 1
        loss, total = plain(c.loss_type), 0.0
        for t in range(n):
            advantage = self.advantage
            if self.teacher is not None:
                advantage -= self.teacher_weight * (old[t] - self.teacher[t])
            span = range(n) if c.importance_sampling_level == "sequence" else [t]
            ratio = math.exp(sum(lp[u] - old[u] for u in span) / len(span))
            fixed_ratio = math.exp(sum(fixed[u] - old[u] for u in span) / len(span))
            if self.teacher is not None:  # each token learns by its own advantage
                ratio = fixed_ratio * math.exp(lp[t] - fixed[t])
            policy = loss.term(c, Token(advantage, lp[t], ratio, fixed_ratio, weight))
            if c.off_policy_mask_threshold is not None and advantage < 0:
                behaviour = old if self.engine is None else self.engine
                if sum(behaviour[u] - fixed[u] for u in range(n)) / n > c.off_policy_mask_threshold:
                    policy = 0.0
            if engine and not loss.holds_correction:
                span = range(n) if c.vllm_importance_sampling_mode.startswith("sequence") else [t]
                policy *= _correction(c, sum(old[u] - engine[u] for u in span))
            kl = math.exp(ref[t] - lp[t]) - (ref[t] - lp[t]) - 1
            total += self.keep[t] * policy + c.beta * kl * (ratio if c.use_bias_correction_kl else 1)
        return total

    def slopes(self) -> list[float]:
        """The loss's gradient, by central differences."""
        lp, step = self.fixed, 1e-6

        def moved(t: int, by: float) -> float:
            return self.loss([*lp[:t], lp[t] + by, *lp[t + 1 :]])

        return [(moved(t, step) - moved(t, -step)) / (2 * step) for t in range(len(lp))]


def _correction(c: AlgorithmConfig, log_ratio: float) -> float:
    low, high = c.vllm_importance_sampling_clip_min or 0.0, c.vllm_importance_sampling_clip_max
    ratio = math.exp(log_ratio)
    if low <= ratio <= high:
        return ratio
    if "mask" in c.vllm_importance_sampling_mode:
        return 0.0
    return low if ratio < low else high
