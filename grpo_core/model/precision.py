"""bfloat16 for the passes, float32 for what adds up: one working copy of the weights, refreshed from the masters."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_core.config.run import RunConfig
from grpo_core.model.four_bit import computing_in_float32


def with_precision_of(config: RunConfig, device: torch.device | str) -> RunConfig:
    """Return the configuration with the precision that `auto` means on this device."""
    on_gpu = torch.device(device).type == "cuda"
    return config.with_precision(torch.cuda.get_device_capability(device) if on_gpu else None)


def make_bfloat16(model: Any) -> Any:
    """Make the model's parameters bfloat16, in place, and return it; buffers stay as they are."""
    for parameter in model.parameters():
        if parameter.is_floating_point():  # else codes of 4-bit weights
            parameter.data = parameter.data.bfloat16()
    return model


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Inside, passes without a gradient compute in float32 with the values that the parameters have: two ways to
    compute the same then differ by less than a bfloat16 rounding, which alone may send a token to another expert.

    A layer has float32 parameters only while it computes: the model is never held in float32 as a whole.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    in_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
    others = [parameter for parameter in model.parameters() if id(parameter) not in in_layers]
    own: list[list[Tensor]] = []  # the parameters' own data, to be restored

    def widen(parameters: Sequence[nn.Parameter]) -> None:
        own.append([parameter.data for parameter in parameters])
        for parameter in parameters:
            if parameter.is_floating_point():
                parameter.data = parameter.data.float()

    def restore(parameters: Sequence[nn.Parameter]) -> None:
        for parameter, data in zip(parameters, own.pop(), strict=True):
            parameter.data = data

    with ExitStack() as stack:
        stack.enter_context(computing_in_float32(model))
        for layer in layers:
            before = layer.register_forward_pre_hook(lambda layer, _: widen([*layer.parameters()]))
            after = layer.register_forward_hook(lambda layer, *_: restore([*layer.parameters()]), always_call=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        widen(others)
        stack.callback(restore, others)
        yield


def working_copy(master: Any) -> Any:
    """Return a copy of the model in bfloat16. A gradient is added to the master's float32 one as soon as it exists, so
    micro-batches add up in float32 and no second set of gradients is held.

    Parameters that are frozen in bfloat16 or in 4 bits are the masters' own. Those that are frozen in float32 (a
    reference that follows the policy) leave the device: no pass reads the masters.
    """
    # Parameters are put into the copy as they are wanted, so that there is never a second float32 model.
    halves: dict[int, nn.Parameter] = {}
    for own in master.parameters():
        if not own.requires_grad and own.dtype != torch.float32:
            halves[id(own)] = own
            continue
        halves[id(own)] = nn.Parameter(own.detach().bfloat16(), own.requires_grad)
        if not own.requires_grad:
            own.data = own.data.cpu()
    working = copy.deepcopy(master, halves)
    for own, parameter in zip(master.parameters(), working.parameters(), strict=True):
        if own.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(_add_to_master, own))
    return working


@torch.no_grad()
def refresh(working: Any, master: Any) -> None:
    """Bring the working copy up to date in one pass: the parameters that are trained, or all if none is."""
    pairs = [*zip(working.parameters(), master.parameters(), strict=True)]
    moved = [(own, source) for own, source in pairs if source.requires_grad] or pairs
    torch._foreach_copy_([own for own, _ in moved], [source for _, source in moved])


@torch.no_grad()
def _add_to_master(master: Tensor, parameter: Tensor) -> None:
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad += parameter.grad
    parameter.grad = None
