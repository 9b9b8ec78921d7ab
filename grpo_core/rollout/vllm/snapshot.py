"""The weights of a sharded model as they were, for a server that may want them at any time.

Each process writes its shards into host memory that has a file descriptor but no name; the process that sends maps
them all, and puts each weight together when its turn comes. Thus a server that returns in the middle of an update is
sent the right weights without any other process, and no process holds the whole model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_core.distributed import gathered_in_block, shard_count, wait_for_all
from grpo_core.model.loading import weight_shards
from grpo_core.rollout.checksums import Sums, bit_sums, read, sums


class Snapshot(Mapping[str, Tensor]):
    """Name → whole weight, made on `device` whenever it is asked for. `checksums`: of each, as the trainer has it."""

    def __init__(self, shards: list[dict[str, Tensor]], device: torch.device, checksums: Mapping[str, int]):
        self.shards, self.device, self.checksums = shards, device, checksums

    def __getitem__(self, name: str) -> Tensor:
        parts = [shard[name].to(self.device) for shard in self.shards if name in shard]
        return torch.cat(parts) if len(parts) > 1 else parts[0]  # a single one may be a scalar, which has no rows

    def __iter__(self) -> Iterator[str]:
        return iter(self.shards[0])

    def __len__(self) -> int:
        return len(self.shards[0])

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole weight."""
        first, *others = [shard[name].shape for shard in self.shards if name in shard]
        return (first[0] + sum(shape[0] for shape in others), *first[1:]) if others else tuple(first)


@torch.no_grad()
def take_snapshot(model: Any, dtype: torch.dtype, *, mine: bool) -> Snapshot | None:
    """Return the weights of a sharded model, as `dtype`, in processes with `mine`; None in the others. Called by every
    process. Those that share one copy of the model see each other's file descriptors: they are on one machine."""
    parameter = next(model.parameters())
    notes, first_rows = dict[str, Sums](), dict[str, int]()
    with os.fdopen(os.memfd_create("grpo-share"), "wb") as file:
        shards = dict[str, Tensor]()
        for name, first_row, shard in weight_shards(model, dtype):
            notes[name], shards[name] = bit_sums(shard), shard.cpu()
            first_rows[name] = first_row * math.prod(shard.shape[1:-1])
        torch.save(shards, file)
        file.flush()
        here = f"/proc/{os.getpid()}/fd/{file.fileno()}", read(notes, first_rows=first_rows)[0]
        parts = gathered_in_block([here], shard_count(model))
        found = None
        if mine:
            files = [torch.load(path, mmap=True, weights_only=True) for [(path, _)] in parts]
            found = Snapshot(files, parameter.device, sums([noted for [(_, noted)] in parts]))
        wait_for_all()  # the memory lives on as long as it is mapped
    return found
