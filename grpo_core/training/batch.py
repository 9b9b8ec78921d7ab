"""Rollouts → what one update trains on one process: plain tensors, right-padded, weights included.

The weights carry an update's whole normalisation, so its rows may go through the model in any order and any cut: those
without a gradient are left out, the others sorted by length and packed, so that little of a pass is padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from grpo_core.algorithm.losses import token_weights
from grpo_core.config.algorithm import LossType
from grpo_core.config.run import RunConfig
from grpo_core.model.sequences import Sequences, pad
from grpo_core.planning.plan import Plan
from grpo_core.rollout.types import GenerationBatch, Rollout


@dataclass(frozen=True)
class MicroBatch:
    """Input of forward and backward passes. The rows of every tensor are the same completions."""

    sequences: Sequences
    mask: Float[Tensor, "B T"]
    weights: Float[Tensor, "B T"]  # see losses.token_weights
    advantages: Float[Tensor, " B"]
    sampling_logprobs: Float[Tensor, "B T"]
    old_logprobs: Float[Tensor, "B T"] | None
    ref_logprobs: Float[Tensor, "B T"] | None
    keep: Float[Tensor, "B T"] | None  # see losses.top_entropy_mask
    entropy_weights: Float[Tensor, "B T"]  # of the entropy bonus: its mean over the tokens that are kept

    def to(self, device: torch.device) -> MicroBatch:
        """Moved to a device, except the sequences, whose lengths are read on the CPU."""
        tensors: dict[str, Any] = {name: v.to(device) for name, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **tensors)


def join(batch: GenerationBatch, rows: Sequence[int]) -> Sequences:
    """Prompts and completions of the given rows joined, on the CPU."""
    lengths = batch.completion_lengths[rows].tolist()
    sequences = [
        batch.prompt_ids[row] + batch.completion_ids[row, :length].tolist()
        for row, length in zip(rows, lengths, strict=True)
    ]
    prompt_lengths = torch.tensor([len(batch.prompt_ids[row]) for row in rows])
    return Sequences(pad(sequences, torch.int64), prompt_lengths, torch.tensor(lengths), batch.prompt_of[rows])


def micro_batch(rollout: Rollout, rows: Sequence[int], plan: Plan, config: RunConfig, micro_steps: int) -> MicroBatch:
    """The given rows of a rollout, weighted as one of the `micro_steps` of an update, on the CPU."""
    sequences = join(rollout, rows)

    def take(values: Tensor) -> Tensor:
        return values[rows, : int(sequences.completion_lengths.max())]

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
        sequences=sequences,
        mask=take(mask),
        weights=weights(config.algorithm.loss_type, mask),
        # A mean over tokens whatever the loss type, so that entropy_coef means the same for all.
        entropy_weights=weights("dapo", kept),
        advantages=rollout.advantages[rows],
        sampling_logprobs=take(rollout.sampling_logprobs),
        old_logprobs=None if rollout.old_logprobs is None else take(rollout.old_logprobs),
        ref_logprobs=None if rollout.ref_logprobs is None else take(rollout.ref_logprobs),
        keep=None if rollout.keep is None else take(rollout.keep),
    )


def concatenate(batches: Sequence[MicroBatch]) -> MicroBatch:
    """The rows of all batches in one, padded to the longest."""

    def rows(name: str) -> Tensor | None:
        tensors = [getattr(batch, name) for batch in batches]
        return None if tensors[0] is None else _stack(tensors)

    columns = dataclasses.fields(Sequences)
    parts = {field.name: _stack([getattr(batch.sequences, field.name) for batch in batches]) for field in columns}
    names = [field.name for field in dataclasses.fields(MicroBatch) if field.name != "sequences"]
    return MicroBatch(Sequences(**parts), **{name: rows(name) for name in names})  # type: ignore[arg-type]


def with_gradient(advantages: Tensor, mask: Tensor) -> Tensor:
    """Which completions' policy term has a gradient, (B,) bool.

    One without advantage, of a group whose rewards are all equal or just at its mean, adds nothing to the gradient of
    any loss type; neither does one without a token in the loss.
    """
    return (advantages != 0) & (mask.sum(1) > 0)


def trained(batch: MicroBatch) -> MicroBatch:
    """The rows whose policy term has a gradient; one without if there are none, so that every process has figures.

    The weights stay, and with them the normalisation.
    """
    rows = with_gradient(batch.advantages, batch.mask).nonzero().flatten()
    if len(rows):
        return take(batch, rows)
    # A row that no gradient needs has no old log-probabilities of its own: the current ones stand in for them.
    return replace(take(batch, batch.sequences.lengths.argmin()[None]), old_logprobs=None)


def take(batch: MicroBatch, rows: Tensor) -> MicroBatch:
    """Some rows of a batch, padded to the longest of them."""
    sequences = batch.sequences.take(rows)
    width = int(sequences.completion_lengths.max())
    tensors = {name: value[rows] for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return replace(batch, sequences=sequences, **{n: v[:, :width] if v.ndim == 2 else v for n, v in tensors.items()})


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    if tensors[0].ndim == 1:
        return torch.cat(list(tensors))
    width = max(tensor.shape[1] for tensor in tensors)
    return torch.cat([nn.functional.pad(tensor, (0, width - tensor.shape[1])) for tensor in tensors])
