"""bfloat16 for the passes, float32 for what adds up: one working copy of the weights, refreshed from the masters."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from grpo_core.config.run import RunConfig


def on_device(config: RunConfig, device: torch.device | str) -> RunConfig:
    """The configuration with the precision that `auto` means on this device."""
    on_gpu = torch.device(device).type == "cuda"
    return config.with_precision(torch.cuda.get_device_capability(device) if on_gpu else None)


def in_bfloat16(model: Any) -> Any:
    """The model with bfloat16 parameters, in place; buffers as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Inside, the model computes in float32 with the values that its parameters have: two ways to compute the same then
    differ by less than a bfloat16 rounding, which alone may send a token to another expert."""
    own = [parameter.data for parameter in model.parameters()]
    try:
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
        yield
    finally:
        for parameter, data in zip(model.parameters(), own, strict=True):
            parameter.data = data


def working_copy(master: Any) -> Any:
    """The model in bfloat16. A gradient is added to the master's float32 one as soon as it is there, so that
    micro-batches add up in float32 and no second set of gradients is held.

    Masters that are not trained move to the CPU's memory: no pass reads them.
    """
    # Parameters are put into the copy as they are wanted, so that there is never a second float32 model.
    halves = {id(own): nn.Parameter(own.detach().bfloat16(), own.requires_grad) for own in master.parameters()}
    working = copy.deepcopy(master, halves)
    for own, parameter in zip(master.parameters(), working.parameters(), strict=True):
        if own.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(_hand_over, own))
        else:
            own.data = own.data.cpu()
    return working


@torch.no_grad()
def refresh(working: Any, master: Any) -> None:
    """Bring the working copy up to date in one pass: the parameters that are trained, or all if none is."""
    pairs = [*zip(working.parameters(), master.parameters(), strict=True)]
    moved = [(own, source) for own, source in pairs if source.requires_grad] or pairs
    torch._foreach_copy_([own for own, _ in moved], [source for _, source in moved])


@torch.no_grad()
def _hand_over(master: Tensor, parameter: Tensor) -> None:
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad += parameter.grad
    parameter.grad = None
