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
