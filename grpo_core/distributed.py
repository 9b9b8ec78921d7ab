"""What the processes of a training say to each other. No other module calls a collective.

Every function is called by all processes, in the same order. With one process each of them is local.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather, gather_object, reduce
from torch import Tensor

BUCKET = 2**26  # gradient elements per message: few calls, little memory

T = TypeVar("T")


def share(count: int) -> range:
    """Which of `count` things this process does; none if there are more processes than things."""
    return share_of(count, PartialState().process_index, PartialState().num_processes)


def share_of(count: int, place: int, processes: int) -> range:
    """The share of the process number `place` of `processes`."""
    return range(count * place // processes, count * (place + 1) // processes)


def wait_for_all() -> None:
    """Return when every process has come here."""
    PartialState().wait_for_everyone()


def from_main(value: T) -> T:
    """The main process's value, on every process."""
    return broadcast_object_list([value])[0]


def gathered(items: list[T]) -> list[T]:
    """The items of all processes, in the processes' order."""
    return gather_object(items)


def gathered_in_block(items: list[T], processes: int) -> list[list[T]]:
    """The items of each process of this process's block: the first `processes` processes are a block, and so on."""
    first = PartialState().process_index // processes * processes
    return gathered([items])[first : first + processes]


def any_process(flag: bool) -> bool:
    """Whether the flag is set on at least one process."""
    if PartialState().num_processes == 1:
        return flag
    return total(torch.tensor(float(flag), device=PartialState().device)).item() > 0


def total(values: Tensor) -> Tensor:
    """Sum over the processes, element by element."""
    return reduce(values, "sum")


def largest(values: Tensor) -> Tensor:
    """Maximum over the processes, element by element. (N,)"""
    return gather(values[None]).max(dim=0).values


@torch.no_grad()
def average_gradients(parameters: Sequence[Tensor]) -> None:
    """Replace each gradient by its mean over the processes, in few large messages.

    A parameter without a gradient on every process gets none, as with one process: the optimizer leaves it alone.
    """
    if not torch.distributed.is_initialized():
        return
    processes = torch.distributed.get_world_size()
    used = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
    torch.distributed.all_reduce(used)
    trained = [parameter for parameter, count in zip(parameters, used.tolist(), strict=True) if count]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    bucket: list[Tensor] = []
    for position, gradient in enumerate(gradients):
        bucket.append(gradient)
        if sum(g.numel() for g in bucket) >= BUCKET or position == len(gradients) - 1:
            flat = torch.cat([g.flatten() for g in bucket]) / processes
            torch.distributed.all_reduce(flat)
            for g, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                g.copy_(mean.view_as(g))
            bucket = []
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.grad = gradient


def clip_gradients(parameters: Sequence[Tensor], max_norm: float) -> float:
    """Scale all gradients so that their common norm is at most `max_norm`; returns the norm before."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm).item()
