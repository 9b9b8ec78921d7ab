"""Tensors made on the CPU, brought to a device in few copies that nothing waits for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def move(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Move the tensors to the device: those of one dtype in one copy out of pinned memory, without waiting for it.

    The results are parts of one buffer per dtype. On the CPU they are the tensors themselves.
    """
    if device.type == "cpu":
        return [*tensors]
    moved: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        buffer = torch.cat([tensors[place].flatten() for place in places]).pin_memory()
        parts = buffer.to(device, non_blocking=True).split([tensors[place].numel() for place in places])
        moved |= {place: part.view(tensors[place].shape) for place, part in zip(places, parts, strict=True)}
    return [moved[place] for place in range(len(tensors))]


def to_device(value: T, device: torch.device) -> T:
    """Return a dataclass with its tensors, and those of the dataclasses and tuples of dataclasses in it, on the
    device."""
    return _with_tensors(value, iter(move([*_tensors(value)], device)))


def _tensors(value: Any) -> Iterator[Tensor]:
    for found in vars(value).values():
        if isinstance(found, Tensor):
            yield found
        elif dataclasses.is_dataclass(found):
            yield from _tensors(found)
        elif isinstance(found, tuple) and all(map(dataclasses.is_dataclass, found)):
            for each in found:
                yield from _tensors(each)


def _with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return the dataclass with other tensors, in the order of `_tensors`."""
    changes: dict[str, Any] = {}
    for name, found in vars(value).items():
        if isinstance(found, Tensor):
            changes[name] = next(tensors)
        elif dataclasses.is_dataclass(found):
            changes[name] = _with_tensors(found, tensors)
        elif isinstance(found, tuple) and all(map(dataclasses.is_dataclass, found)):
            changes[name] = tuple(_with_tensors(each, tensors) for each in found)
    return dataclasses.replace(value, **changes)
