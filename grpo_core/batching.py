"""Rollouts → what one update trains on one process: plain tensors, right-padded, weights included.

The weights carry an update's whole normalisation, so its rows may go through the model in any order and any cut: those
without a gradient are left out, the others sorted by length and packed, so that little of a pass is padding.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from grpo_core.config import RunConfig
from grpo_core.losses import LossType, token_weights
from grpo_core.plan import Plan
from grpo_core.rollout.engine import Rollout, pad


@dataclass(frozen=True)
class Sequences:
    """B prompts and completions joined, right-padded: causal attention needs no mask. Log-probabilities are (B, T).

    On the CPU; the policy takes what it needs to its device.
    """

    input_ids: Int64[Tensor, "B L"]
    prompt_lengths: Int64[Tensor, " B"]
    completion_lengths: Int64[Tensor, " B"]  # their largest is T

    @property
    def lengths(self) -> Tensor:
        return self.prompt_lengths + self.completion_lengths

    def take(self, rows: Tensor) -> Sequences:
        """Some rows, padded to the longest of them."""
        chosen = Sequences(self.input_ids[rows], self.prompt_lengths[rows], self.completion_lengths[rows])
        return replace(chosen, input_ids=chosen.input_ids[:, : int(chosen.lengths.max())])


@dataclass(frozen=True)
class MicroBatch:
    """What a forward/backward needs; every tensor's rows are the same completions."""

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
        """On a device, but for the sequences, whose lengths say how large its work is."""
        tensors: dict[str, Any] = {name: v.to(device) for name, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **tensors)


def join(rollout: Rollout, rows: Sequence[int]) -> Sequences:
    """The given rows of a rollout as sequences, on the CPU."""
    lengths = rollout.completion_lengths[rows].tolist()
    sequences = [
        rollout.prompt_ids[row] + rollout.completion_ids[row, :length].tolist()
        for row, length in zip(rows, lengths, strict=True)
    ]
    prompt_lengths = torch.tensor([len(rollout.prompt_ids[row]) for row in rows])
    return Sequences(pad(sequences, torch.int64), prompt_lengths, torch.tensor(lengths))


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

    tensors = ("input_ids", "prompt_lengths", "completion_lengths")
    parts = {name: _stack([getattr(batch.sequences, name) for batch in batches]) for name in tensors}
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


def pack(sequences: Sequences, tokens: int, *, share_prompts: bool) -> Iterator[Tensor]:
    """The rows in parts of at most `tokens` tokens, or of one row: those with the same prompt, then those of like
    length next to each other. A prompt counts once in a part with `share_prompts`, else padding counts too.

    Completions padded to the longest, as a line's attention has them on a CPU, are at most twice as many.
    """
    lengths, completions = sequences.lengths.tolist(), sequences.completion_lengths.tolist()
    if share_prompts:
        _, owners = prompts_of(sequences)
        longest: dict[int, int] = defaultdict(int)
        for row, owner in enumerate(owners):
            longest[owner] = max(longest[owner], lengths[row])
        order = sorted(range(len(lengths)), key=lambda row: (-longest[owners[row]], owners[row], -lengths[row]))
    else:
        order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    part: list[int] = []
    filled = longest_completion = 0
    for row in order:
        if share_prompts:
            known = part and owners[row] == owners[part[-1]]
            after = filled + (completions[row] if known else lengths[row])
        else:
            after = (len(part) + 1) * lengths[part[0] if part else row]
        padded = (len(part) + 1) * max(longest_completion, completions[row])
        if part and (after > tokens or padded > 2 * tokens):
            yield torch.tensor(part)
            part, after, longest_completion = [], lengths[row], 0
        part.append(row)
        filled, longest_completion = after, max(longest_completion, completions[row])
    yield torch.tensor(part)


def prompts_of(sequences: Sequences) -> tuple[list[int], list[int]]:
    """The first row of each different prompt, and for each row which of these its prompt is."""
    places: dict[tuple[int, ...], int] = {}
    firsts: list[int] = []
    owners: list[int] = []
    for row, (ids, length) in enumerate(
        zip(sequences.input_ids.tolist(), sequences.prompt_lengths.tolist(), strict=True)
    ):
        prompt = tuple(ids[:length])
        if prompt not in places:
            places[prompt] = len(firsts)
            firsts.append(row)
        owners.append(places[prompt])
    return firsts, owners


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
