"""Rollouts → the micro-batches of one update on one process: plain tensors, right-padded, weights included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_core.config import RunConfig
from grpo_core.losses import LossType, token_weights
from grpo_core.plan import Plan
from grpo_core.rollout.engine import Rollout, pad


@dataclass(frozen=True)
class Sequences:
    """Prompts and completions joined, right-padded: causal attention needs no mask. Log-probabilities are (B, T)."""

    input_ids: Tensor  # (B, L) int64
    prompt_lengths: Tensor  # (B,) int64
    num_completion_tokens: int  # T

    def to(self, device: torch.device) -> Sequences:
        return Sequences(self.input_ids.to(device), self.prompt_lengths.to(device), self.num_completion_tokens)


@dataclass(frozen=True)
class MicroBatch:
    """What one forward/backward needs; every tensor's rows are the same completions."""

    sequences: Sequences
    mask: Tensor  # (B, T)
    weights: Tensor  # (B, T), see losses.token_weights
    advantages: Tensor  # (B,)
    sampling_logprobs: Tensor  # (B, T)
    old_logprobs: Tensor | None  # (B, T)
    ref_logprobs: Tensor | None  # (B, T)
    keep: Tensor | None  # (B, T) see losses.top_entropy_mask
    entropy_weights: Tensor  # (B, T) of the entropy bonus: its mean over the tokens that are kept


def join(rollout: Rollout, rows: Sequence[int]) -> Sequences:
    """The given rows of a rollout as sequences, on the CPU."""
    lengths = rollout.completion_lengths[rows].tolist()
    sequences = [
        rollout.prompt_ids[row] + rollout.completion_ids[row, :length].tolist()
        for row, length in zip(rows, lengths, strict=True)
    ]
    prompt_lengths = torch.tensor([len(rollout.prompt_ids[row]) for row in rows])
    return Sequences(pad(sequences, torch.int64), prompt_lengths, max(lengths))


def micro_batch(
    rollout: Rollout, rows: Sequence[int], plan: Plan, config: RunConfig, micro_steps: int, device: torch.device
) -> MicroBatch:
    """The given rows of a rollout, weighted as one of the `micro_steps` of an update."""
    sequences = join(rollout, rows)

    def take(values: Tensor) -> Tensor:
        return values[rows, : sequences.num_completion_tokens].to(device)

    def weights(loss_type: LossType, trained: Tensor) -> Tensor:
        return token_weights(
            loss_type,
            take(trained),
            micro_steps=micro_steps,
            rollout_tokens=max(int(trained.sum()), 1),
            steps_per_generation=plan.steps_per_generation,
            num_processes=plan.num_processes,
            max_completion_length=config.rollout.max_completion_length,
        )

    mask = rollout.completion_mask
    kept = mask if rollout.keep is None else mask * rollout.keep
    return MicroBatch(
        sequences=sequences.to(device),
        mask=take(mask),
        weights=weights(config.algorithm.loss_type, mask),
        # A mean over tokens whatever the loss type, so that entropy_coef means the same for all.
        entropy_weights=weights("dapo", kept),
        advantages=rollout.advantages[rows].to(device),
        sampling_logprobs=take(rollout.sampling_logprobs),
        old_logprobs=None if rollout.old_logprobs is None else take(rollout.old_logprobs),
        ref_logprobs=None if rollout.ref_logprobs is None else take(rollout.ref_logprobs),
        keep=None if rollout.keep is None else take(rollout.keep),
    )


def cut(batch: MicroBatch, rows: int) -> Iterator[MicroBatch]:
    """The micro-batch in parts of at most `rows` completions; weights go with their rows, so nothing else changes."""
    for start in range(0, len(batch.mask), rows):
        part = slice(start, start + rows)
        ids, lengths = batch.sequences.input_ids[part], batch.sequences.prompt_lengths[part]
        tensors = {name: value[part] for name, value in vars(batch).items() if isinstance(value, Tensor)}
        yield replace(batch, sequences=Sequences(ids, lengths, batch.sequences.num_completion_tokens), **tensors)
