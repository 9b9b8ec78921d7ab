"""The weights of a sharded model as they were, for a server that may want them at any time.

Each process writes its shards into host memory that has a file descriptor but no name; the process that sends maps
them all, and puts each weight together when its turn comes. Thus a server that returns in the middle of an update is
sent the right weights without any other process, and no process holds the whole model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_core.distributed import gathered_in_block, shard_count, wait_for_all
from grpo_core.model.loading import weight_shards


class Snapshot(Mapping[str, Tensor]):
    """Name → whole weight, made on `device` whenever it is asked for."""

    def __init__(self, shards: list[dict[str, Tensor]], device: torch.device):
        self.shards, self.device = shards, device

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
    with os.fdopen(os.memfd_create("grpo-share"), "wb") as file:
        torch.save({name: shard.cpu() for name, shard in weight_shards(model, dtype)}, file)
        file.flush()
        paths = gathered_in_block([f"/proc/{os.getpid()}/fd/{file.fileno()}"], shard_count(model))
        found = None
        if mine:
            shards = [torch.load(path, mmap=True, weights_only=True) for (path,) in paths]
            found = Snapshot(shards, parameter.device)
        wait_for_all()  # the memory lives on as long as it is mapped
    return found
