"""Memory of tensors that are alive at the same time, as torch's operations make them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Inside, `peak` is the most bytes that tensors had together that this thread made by computing or copying. Views
    do not count, nor what is mapped from a file."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.total = 0  # of these; some may be gone
        self.peak = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it takes time at each operation, and nothing is compiled inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages((result,)):
            if storage._cdata not in given:
                self.total += storage.nbytes() - self.alive.pop(storage._cdata, (None, 0))[1]
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if self.total > self.peak:
            self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        """Return the bytes of those that are not gone."""
        self.alive = {key: found for key, found in self.alive.items() if not found[0].expired()}
        self.total = sum(size for _, size in self.alive.values())
        return self.total


def _storages(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.device.type != "meta":
                yield value.untyped_storage()
        elif isinstance(value, torch.UntypedStorage):
            yield value
        elif isinstance(value, list | tuple | dict):
            yield from _storages(value.values() if isinstance(value, dict) else value)
