"""Whether each weight reaches the engine: what is noted of it where it leaves the trainer, and where the engine's
loading function receives it, before it is fused or packed, is compared once per hand-over.

That is its checksum, from sums on its device. An engine in this process receives the very tensors that leave the
trainer: there, it is their place in memory, which costs nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grpo_core.errors import EngineError

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element
WORD = 8  # bytes that are added up as one integer
# Odd numbers without a pattern (the constants of splitmix64), as int64.
NUMBER, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
SHOWN = 5  # names in a message
LOST = "weights are lost: "  # before what a worker says of them whose answers vLLM does not pass on


Sums = tuple[Tensor, Tensor]


def bit_sums(tensor: Tensor) -> Sums:
    """Return the sums of the bits of each row and of each column, which `read` makes a checksum of: (R,) and (C,)
    int64, modulo 2⁶⁴, on the tensor's device, which is not waited for.

    A row is what lies along the last dimension, of a vector one element. It is added up as 64-bit words, or as elements
    where it has no whole number of words.
    """
    width = tensor.shape[-1] if tensor.ndim > 1 else 1
    rows = tensor.detach().reshape(math.prod(tensor.shape[:-1]) if tensor.ndim > 1 else tensor.numel(), width)
    if not rows.is_contiguous() or rows.storage_offset() * rows.itemsize % WORD:
        rows = rows.clone(memory_format=torch.contiguous_format)
    in_words = width * rows.itemsize % WORD == 0  # no element is converted
    bits = rows.view(torch.int64 if in_words else INTEGERS[rows.itemsize])
    return bits.sum(1, dtype=torch.int64), bits.sum(0, dtype=torch.int64)


def read(*several: Mapping[str, Sums], first_rows: Mapping[str, int] | None = None) -> list[dict[str, int]]:
    """Return each tensor's checksum, given its sums, after one wait for their device: with splitmix64's finaliser as
    mix, Σ mix(rowᵣ ⊕ r·NUMBER) + Σ columnₖ · (mix(k·NUMBER) | 1), modulo 2⁶⁴.

    Other values change it, and so do the same values at other places, unless each of the sums stays what it was.
    Checksums of consecutive rows, given the number of the first, add up to the whole tensor's.
    """
    named = [(name, *pair) for notes in several for name, pair in notes.items()]
    rows, columns = [found for _, found, _ in named], [found for _, _, found in named]
    firsts = [(first_rows or {}).get(name, 0) for name, *_ in named] + [0] * len(columns)
    numbers = [torch.arange(first, first + len(each)) for first, each in zip(firsts, rows + columns, strict=True)]
    bits = torch.cat(rows + columns or [torch.arange(0)]).cpu()
    places, in_rows = torch.cat([*numbers, bits[:0]]) * NUMBER, sum(map(len, rows))
    weighed = bits[in_rows:] * (_mix(places[in_rows:]) | 1)
    totals = torch.cat([bits.new_zeros(1), _mix(bits[:in_rows] ^ places[:in_rows]), weighed]).cumsum(0)
    ends = totals[torch.tensor([0, *itertools.accumulate(map(len, rows + columns))])]
    values = iter(ends.diff().view(2, -1).sum(0).tolist())
    return [{name: next(values) for name in notes} for notes in several]


def _mix(numbers: Tensor) -> Tensor:
    numbers = numbers * FIRST
    return (numbers ^ (numbers >> 29)) * SECOND


def sums(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the whole tensors' checksums, given those of their parts."""
    totals: dict[str, int] = {}
    for name, value in itertools.chain(*(part.items() for part in parts)):
        totals[name] = (totals.get(name, 0) + value + 2**63) % 2**64 - 2**63  # as int64 does
    return totals


def place(tensor: Tensor) -> tuple[Any, ...]:
    """Return where the tensor lies in this process's memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


Note = Callable[[Tensor], Any]  # bit_sums or place


def noted(weights: Iterable[tuple[str, Tensor]], notes: dict[str, Any], note: Note) -> Iterator[tuple[str, Tensor]]:
    """Pass named weights on, and note each."""
    for name, tensor in weights:
        notes[name] = note(tensor)
        yield name, tensor


def checksums_of(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the checksum of each weight."""
    return read({name: bit_sums(tensor) for name, tensor in weights.items()})[0]


@dataclass
class Received:
    """What an engine's loading functions have received since the last `take`."""

    note: Note
    notes: dict[str, Any] = field(default_factory=dict)
    unloaded: set[str] = field(default_factory=set)  # of the engine's parameters, those that nothing was loaded into
    unknown: set[str] = field(default_factory=set)  # modules of an adapter that the engine does not have

    def take(self, sent: Mapping[str, Any]) -> list[str]:
        """Return a phrase for each weight that has not arrived as it was sent, and forget what was received."""
        lost = differences(sent, read(self.notes)[0] if self.note is bit_sums else self.notes)
        lost += [f"nothing was loaded into the engine's {name}" for name in sorted(self.unloaded)]
        lost += [f"the engine has no {name}, which the adapter changes" for name in sorted(self.unknown)]
        self.notes, self.unloaded, self.unknown = {}, set(), set()
        return lost


def note_loading(model: Any, note: Note) -> Received:
    """Make a model of vLLM note from now on what its `load_weights` receives, in what is returned."""
    received, load = Received(note), model.load_weights

    def load_and_note(weights: Iterable[tuple[str, Tensor]]) -> Any:
        if not received.notes:
            received.unloaded = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        loaded = load(noted(weights, received.notes, note))
        received.unloaded = set() if loaded is None else received.unloaded - loaded
        return loaded

    model.load_weights = load_and_note
    return received


def differences(sent: Mapping[str, Any], received: Mapping[str, Any]) -> list[str]:
    """Return a phrase for each weight that has not arrived as it was sent."""
    lost = [f"{name} did not arrive" for name in sent if name not in received]
    lost += [f"{name} was not sent" for name in received if name not in sent]
    return lost + [f"{name} arrived with other values" for name in sent if received.get(name, sent[name]) != sent[name]]


def refuse_lost(lost: list[str]) -> None:
    """Raises EngineError, which names the weights, if some are lost."""
    if lost:
        more = f", and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
        raise EngineError(
            f"the engine does not have the trainer's weights: {', '.join(lost[:SHOWN])}{more}. Nothing was sampled "
            "with them; try rollout.engine = 'transformers', and report this"
        )
