"""Prompts and completions as rows of tokens, and how many of them share a forward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from jaxtyping import Int16, Int64
from torch import Tensor


def number_prompts(prompts: Iterable[Sequence[int]]) -> Tensor:
    """Number of each prompt, which is known by its token ids: equal ids have the same number, whichever dataset rows
    they come from, and the same row another if an environment added to it. (B,) int64"""
    numbers: dict[tuple[int, ...], int] = {}
    return torch.tensor([numbers.setdefault(tuple(prompt), len(numbers)) for prompt in prompts])


def pad(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """Rows of different lengths as one tensor, zeros on the right. (B, T)"""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    padded = np.zeros((len(rows), lengths.max(initial=0)), torch.empty(0, dtype=dtype).numpy().dtype)
    filled = np.arange(padded.shape[1]) < lengths[:, None]
    padded[filled] = np.fromiter(chain.from_iterable(rows), padded.dtype, lengths.sum())
    return torch.from_numpy(padded)


@dataclass(frozen=True)
class Sequences:
    """B prompts and completions joined, right-padded: causal attention needs no mask. Log-probabilities are (B, T).

    On the CPU; the policy takes what it needs to its device.
    """

    input_ids: Int64[Tensor, "B L"]
    prompt_lengths: Int64[Tensor, " B"]
    completion_lengths: Int64[Tensor, " B"]  # their largest is T
    prompt_of: Int64[Tensor, " B"]  # number of the prompt's token ids, not of its dataset row: see number_prompts
    routes: Int16[Tensor, "B L F"] | None = None  # the engine's experts of each token, see routing.choices

    @property
    def lengths(self) -> Tensor:
        return self.prompt_lengths + self.completion_lengths

    def take(self, rows: Tensor) -> Sequences:
        """Select rows, padded to the longest of them."""
        chosen = replace(self, **{name: values[rows] for name, values in vars(self).items() if values is not None})
        width = int(chosen.lengths.max())
        routes = None if chosen.routes is None else chosen.routes[:, :width]
        return replace(chosen, input_ids=chosen.input_ids[:, :width], routes=routes)

    def tokens_of(self, rows: Tensor, *, share_prompts: bool) -> int:
        """Number of tokens in a pass over these rows: each prompt once with `share_prompts`, otherwise with padding."""
        lengths = self.lengths[rows]
        if not share_prompts:
            return len(rows) * int(lengths.max())
        prompts = dict(zip(self.prompt_of[rows].tolist(), self.prompt_lengths[rows].tolist(), strict=True))
        return sum(prompts.values()) + int(self.completion_lengths[rows].sum())


def pack(sequences: Sequences, tokens: int, *, share_prompts: bool) -> Iterator[Tensor]:
    """Divide the rows into parts of at most `tokens` tokens, or of one row; rows of like length are next to each other.
    With `share_prompts`, so are rows with the same prompt, and it counts once; otherwise padding counts too.

    Completions padded to the longest of their part are at most twice as many tokens: attention on a CPU pads those of
    like length together.
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
    """Return the first row of each different prompt, and for each row the index of its prompt among these."""
    prompts, firsts = sequences.prompt_of.tolist(), dict[int, int]()
    for row, prompt in enumerate(prompts):
        firsts.setdefault(prompt, row)
    places = {prompt: place for place, prompt in enumerate(firsts)}
    return [*firsts.values()], [places[prompt] for prompt in prompts]
