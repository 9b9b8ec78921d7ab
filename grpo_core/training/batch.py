"""Rollouts → the batch that one update trains on: plain tensors, right-padded, weights included.

The weights carry an update's whole normalisation, so its rows may be divided among processes and passes in any way:
those without a gradient are left out, each process takes about as many tokens, and its passes hold rows of like length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from grpo_core.algorithm.losses import token_weights
from grpo_core.config.losses import LOSSES, Normaliser
from grpo_core.config.run import RunConfig
from grpo_core.data.order import training_order
from grpo_core.model.sequences import Sequences, number_prompts, pad
from grpo_core.planning.plan import Plan
from grpo_core.rollout.types import GenerationBatch, Rollout
from grpo_core.system.to_device import move

BOUND = 0.05  # largest deviation of a process's tokens from the mean, relative; beyond it, groups are split


@dataclass(frozen=True)
class MicroBatch:
    """Rows to train on: a whole update, one process's share, or one pass. A row is the same completion in every
    tensor."""

    sequences: Sequences
    mask: Float[Tensor, "B T"]
    weights: Float[Tensor, "B T"]  # see losses.token_weights
    advantages: Float[Tensor, " B"]
    sampling_logprobs: Float[Tensor, "B T"]
    old_logprobs: Float[Tensor, "B T"] | None
    ref_logprobs: Float[Tensor, "B T"] | None
    keep: Float[Tensor, "B T"] | None  # see losses.top_entropy_mask
    entropy_weights: Float[Tensor, "B T"]  # of the entropy bonus: its mean over the tokens that are kept
    teacher_logprobs: Float[Tensor, "B T"] | None = None
    taught: Float[Tensor, " B"] | None = None  # see Rollout
    shown: Sequences | None = None  # the same completions behind the prompts that a teacher reads, see Rollout

    def to(self, device: torch.device) -> MicroBatch:
        """Move to a device, except the sequences, whose lengths are read on the CPU. Nothing waits for it."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        moved = zip(tensors, move([*tensors.values()], device), strict=True)
        return replace(self, **dict(moved))


def join(batch: GenerationBatch, rows: Sequence[int]) -> Sequences:
    """Join prompts and completions of the given rows, on the CPU."""
    prompts = [batch.prompt_ids[row] for row in rows]
    prompt_lengths, lengths = torch.tensor([len(prompt) for prompt in prompts]), batch.completion_lengths[rows]
    width = int(lengths.max())
    ids = nn.functional.pad(pad(prompts, torch.int64), (0, width))
    row, offset = (torch.arange(width) < lengths[:, None]).nonzero(as_tuple=True)
    ids[row, prompt_lengths[row] + offset] = batch.completion_ids[torch.tensor(rows)[row], offset]
    ids = ids[:, : int((prompt_lengths + lengths).max())]
    routes = None if batch.routes is None else batch.routes[rows][:, : ids.shape[1]]
    return Sequences(ids, prompt_lengths, lengths, number_prompts(prompts), routes)


def update_batch(parts: Sequence[tuple[Rollout, int]], plan: Plan, config: RunConfig) -> MicroBatch:
    """Return an update's rows, of all processes, on the CPU. `parts`: its micro-steps, each a slice of a rollout."""
    rollouts = {rollout.index: rollout for rollout, _ in parts}
    slices = {index: [part for rollout, part in parts if rollout.index == index] for index in rollouts}
    return concatenate(
        [_slices(rollout, slices[index], plan, config, len(parts)) for index, rollout in rollouts.items()]
    )


def _slices(rollout: Rollout, slices: Sequence[int], plan: Plan, config: RunConfig, micro_steps: int) -> MicroBatch:
    """Return the rows of some slices of a rollout, weighted by the plan: b of each process per micro-step."""
    order = training_order(plan, config.seed, rollout.index)[slices].reshape(-1, plan.per_device_train_batch_size)
    rows = torch.from_numpy(order.flatten())
    sequences, shown = join(rollout, rows.tolist()), None
    if rollout.shown is not None:
        shown = join(replace(rollout, prompt_ids=rollout.shown, routes=None), rows.tolist())
    width = int(sequences.completion_lengths.max())

    mask = rollout.completion_mask
    kept = mask if rollout.keep is None else mask * rollout.keep
    own = rows, slice(width)
    return MicroBatch(
        sequences=sequences,
        mask=mask[own],
        weights=_weights(LOSSES[config.algorithm.loss_type].normaliser, mask, own, plan, config, micro_steps),
        # A mean over tokens whatever the loss type, so that entropy_coef means the same for all.
        entropy_weights=_weights("generation batch", kept, own, plan, config, micro_steps),
        advantages=rollout.advantages[rows],
        sampling_logprobs=rollout.sampling_logprobs[own],
        old_logprobs=None if rollout.old_logprobs is None else rollout.old_logprobs[own],
        ref_logprobs=None if rollout.ref_logprobs is None else rollout.ref_logprobs[own],
        keep=None if rollout.keep is None else rollout.keep[own],
        teacher_logprobs=None if rollout.teacher_logprobs is None else rollout.teacher_logprobs[own],
        taught=None if rollout.taught is None else rollout.taught[rows],
        shown=shown,
    )


def _weights(
    normaliser: Normaliser, trained: Tensor, own: tuple[Tensor, slice], plan: Plan, config: RunConfig, micro_steps: int
) -> Tensor:
    """Return the weights of some rows' tokens; `trained`: which tokens of the whole rollout count, `own`: these
    rows, and the columns that they fill."""
    rollout_tokens = max(int(trained.sum()), 1)
    of_micro_steps = [
        token_weights(
            normaliser,
            mask,
            micro_steps=micro_steps,
            rollout_tokens=rollout_tokens,
            steps_per_generation=plan.steps_per_generation,
            num_processes=plan.num_processes,
            max_completion_length=config.rollout.max_completion_length,
        )
        for mask in trained[own].split(plan.per_device_train_batch_size)
    ]
    return torch.cat(of_micro_steps)


def concatenate(batches: Sequence[MicroBatch]) -> MicroBatch:
    """Join the rows of all batches, padded to the longest."""
    if len(batches) == 1:
        return batches[0]

    def joined(name: str) -> Any:
        values = [getattr(batch, name) for batch in batches]
        if values[0] is None:
            return None
        return _join_sequences(values) if isinstance(values[0], Sequences) else _stack(values)

    return MicroBatch(**{field.name: joined(field.name) for field in dataclasses.fields(MicroBatch)})


def _join_sequences(parts: Sequence[Sequences]) -> Sequences:
    found = {field.name: [getattr(part, field.name) for part in parts] for field in dataclasses.fields(Sequences)}
    columns: dict[str, Any] = {name: None if each[0] is None else _stack(each) for name, each in found.items()}
    rows = zip(columns["input_ids"].tolist(), columns["prompt_lengths"].tolist(), strict=True)
    columns["prompt_of"] = number_prompts(ids[:length] for ids, length in rows)
    return Sequences(**columns)


def has_gradient(config: RunConfig, advantages: Tensor, mask: Tensor, taught: Tensor | None) -> Tensor:
    """Return which completions have a gradient. `taught`: see `Rollout`. (B,) bool

    A completion with a token in the loss has one if it has an advantage, if a teacher teaches it, or if KL, an entropy
    bonus or the routers' loss trains all. It has no advantage if its reward equals its group's mean.
    """
    if config.algorithm.trains_every or (config.teacher.is_used and taught is None):
        return mask.sum(1) > 0
    return ((advantages != 0) if taught is None else (advantages != 0) | (taught > 0)) & (mask.sum(1) > 0)


def own_rows(batch: MicroBatch, config: RunConfig, process: int, processes: int, *, share_prompts: bool) -> MicroBatch:
    """Return the rows of an update that one process computes, at least one, so that every process has figures. Rows
    without a gradient are left out. Token weights are unchanged, so the normalisation is too."""
    needed = has_gradient(config, batch.advantages, batch.mask, batch.taught)
    if not needed.any():
        needed[batch.sequences.lengths.argmin()] = True
        # Old log-probabilities were not computed for this row: the current ones are used.
        batch = replace(batch, old_logprobs=None)
    mine = balance_rows(batch.sequences, needed.nonzero().flatten(), processes, share_prompts=share_prompts)[process]
    return take(batch, mine) if len(mine) else idle_row(take(batch, needed.nonzero().flatten()))


def idle_row(batch: MicroBatch) -> MicroBatch:
    """Return the batch's shortest row, with weight 0: a pass that adds nothing to the gradient or to any figure."""
    row = take(batch, batch.sequences.lengths.argmin()[None])
    nothing = torch.zeros_like(row.mask)
    return replace(row, mask=nothing, weights=nothing, entropy_weights=nothing)


def balance_rows(sequences: Sequences, rows: Tensor, processes: int, *, share_prompts: bool) -> list[Tensor]:
    """Divide the rows among processes, about as many tokens each, since every process waits for the slowest. With
    `share_prompts`, a process computes each of its prompts once."""
    prompts, completions = sequences.prompt_lengths[rows], sequences.completion_lengths[rows]
    if share_prompts:
        parts = divide(sequences.prompt_of[rows].tolist(), prompts.tolist(), completions.tolist(), processes)
    else:
        parts = divide(range(len(rows)), prompts.tolist(), completions.tolist(), processes)
    return [rows[part] for part in parts]


@dataclass
class _Loads:
    """Rows and tokens of each process. Heaps find the emptiest and the fullest: an entry whose tokens are no longer its
    process's is passed over."""

    tokens: list[int]
    held: list[dict[int, list[int]]]  # rows by group
    from_least: list[tuple[int, int]]  # tokens, process
    from_most: list[tuple[int, int]]  # -tokens, process

    def emptiest(self) -> int:
        while self.tokens[self.from_least[0][1]] != self.from_least[0][0]:
            heappop(self.from_least)
        return self.from_least[0][1]

    def fullest(self) -> int:
        while self.tokens[self.from_most[0][1]] != -self.from_most[0][0]:
            heappop(self.from_most)
        return self.from_most[0][1]

    def set_tokens(self, process: int, tokens: int) -> None:
        self.tokens[process] = tokens
        heappush(self.from_least, (tokens, process))
        heappush(self.from_most, (-tokens, process))

    def largest_deviation(self) -> float:
        """Largest deviation of a process's load from the mean, relative."""
        mean = sum(self.tokens) / len(self.tokens)
        most, least = self.tokens[self.fullest()], self.tokens[self.emptiest()]
        return max(most - mean, mean - least) / mean if mean else 0.0


def divide(
    prompt_of: Sequence[int], prompt_lengths: Sequence[int], completion_lengths: Sequence[int], processes: int
) -> list[list[int]]:
    """Return the rows of each process. A pure function of lengths and groups: all processes find the same on their own.

    A process's load is the tokens of its completions, and of each of its prompts once. Groups (rows with the same
    `prompt_of`) go to the process with the least load, the costliest first. While a process is more than 5 % off the
    mean, some rows of one group move from the fullest to the emptiest. If few long completions dominate, dealing single
    rows in the same way may make the fullest less full; then that is done.
    """
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(prompt_of):
        groups.setdefault(group, []).append(row)
    prompts = {group: prompt_lengths[rows[0]] for group, rows in groups.items()}

    def tokens(rows: Sequence[int]) -> int:
        return sum(completion_lengths[row] for row in rows)

    def deal(pieces: list[tuple[int, list[int]]]) -> _Loads:
        first = [(0, process) for process in range(processes)]
        loads = _Loads([0] * processes, [{} for _ in range(processes)], first, [*first])
        holders: dict[int, set[int]] = {}
        for group, rows in sorted(pieces, key=lambda piece: -(prompts[piece[0]] + tokens(piece[1]))):
            candidates = holders.setdefault(group, set()) | {loads.emptiest()}
            cost, process = min(
                (loads.tokens[it] + (0 if group in loads.held[it] else prompts[group]), it) for it in candidates
            )
            loads.set_tokens(process, cost + tokens(rows))
            loads.held[process].setdefault(group, []).extend(rows)
            holders[group].add(process)
        while loads.largest_deviation() > BOUND and _move_rows(loads, prompts, completion_lengths):
            pass
        return loads

    loads = deal([*groups.items()])
    if loads.largest_deviation() > BOUND:
        by_row = deal([(group, [row]) for group, rows in groups.items() for row in rows])
        loads = min(loads, by_row, key=lambda loads: max(loads.tokens))
    return [sorted(row for rows in held.values() for row in rows) for held in loads.held]


def _move_rows(loads: _Loads, prompts: dict[int, int], lengths: Sequence[int]) -> bool:
    """Move some rows of one group from the fullest process to the emptiest; False if no move helps."""
    mean = sum(loads.tokens) / len(loads.tokens)
    fullest, emptiest = loads.fullest(), loads.emptiest()
    most, least, held = loads.tokens[fullest], loads.tokens[emptiest], loads.held
    wanted = min(most - mean, mean - least)
    best, after = None, (most, least)
    for group, rows in held[fullest].items():
        arriving = 0 if group in held[emptiest] else prompts[group]
        chosen = _rows_within(wanted - arriving, rows, lengths)
        moved = sum(lengths[row] for row in chosen)
        leaving = prompts[group] if len(chosen) == len(rows) else 0
        found = most - moved - leaving, least + moved + arriving
        if max(found) < max(after):
            best, after = (group, chosen), found
    if best is None:
        return False
    group, chosen = best
    held[emptiest].setdefault(group, []).extend(chosen)
    if left := [row for row in held[fullest].pop(group) if row not in chosen]:
        held[fullest][group] = left
    for process, tokens in zip((fullest, emptiest), after, strict=True):
        loads.set_tokens(process, tokens)
    return True


def _rows_within(tokens: float, rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Choose rows of at most `tokens` together, the longest first; the shortest row if none fits."""
    ordered = sorted(rows, key=lambda row: -lengths[row])
    chosen = []
    for row in ordered:
        if lengths[row] <= tokens:
            chosen.append(row)
            tokens -= lengths[row]
    return chosen or ordered[-1:]


def take(batch: MicroBatch, rows: Tensor) -> MicroBatch:
    """Select rows of a batch, padded to the longest of them."""
    width = int(batch.sequences.completion_lengths[rows].max())

    def taken(value: Any) -> Any:
        if isinstance(value, Sequences):
            return value.take(rows)
        return value if value is None else value[rows][:, :width] if value.ndim == 2 else value[rows]

    return MicroBatch(**{name: taken(value) for name, value in vars(batch).items()})


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    if tensors[0].ndim == 1:
        return torch.cat(list(tensors))
    width = max(tensor.shape[1] for tensor in tensors)
    deeper = [0, 0] * (tensors[0].ndim - 2)
    return torch.cat([nn.functional.pad(tensor, [*deeper, 0, width - tensor.shape[1]]) for tensor in tensors])
