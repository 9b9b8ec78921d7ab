"""The optimizer of a training: AdamW, with moments of 32 or of 8 bits, which may rest in the host's memory."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from grpo_core.config.training import TrainConfig
from grpo_core.distributed import own_shard
from grpo_core.planning.plan import Plan

# In parameter names, as Trainer.get_decay_parameter_names of transformers has them.
BIAS_OR_NORM = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")

BLOCK = 256  # moments that have one scale
SMALLEST = 4096  # elements from which a parameter, or a process's shard of it, has moments of 8 bits
HOST = torch.device("cpu")
TOGETHER = 2**22  # elements whose moments are float32 at the same time, a multiple of BLOCK


def make_optimizer(model: torch.nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices, except those that transformers' Trainer takes for biases or norms, such as
    the biases of fused experts and the norms of single heads. Its state exists, as before a first step."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed, others = list[Tensor](), list[Tensor]()
    for name, parameter in trained.items():
        is_weight = parameter.ndim >= 2 and not BIAS_OR_NORM.search(name.lower())
        (decayed if is_weight else others).append(parameter)
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = adamw([group for group in groups if group["params"]], config)
    # One step at the rate 0, which changes nothing, takes the memory of gradients and state, so that it runs out now
    # and not after the first rollout. Each update sets its own rate.
    for parameter in trained.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for state in optimizer.state.values():
        state["step"].zero_()
    return optimizer


def adamw(groups: list[dict[str, Any]], config: TrainConfig) -> torch.optim.Optimizer:
    """Make the configured kind of AdamW for these groups of parameters, with learning rate 0 and without state."""
    settings: dict[str, Any] = {"lr": 0.0, "betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_epsilon}
    if config.optim == "adamw_8bit":
        return (OffloadedAdamW8bit if config.offload == "optimizer" else AdamW8bit)(groups, **settings)
    return (OffloadedAdamW if config.offload == "optimizer" else torch.optim.AdamW)(groups, fused=True, **settings)


def learning_rate(config: TrainConfig, plan: Plan, updates: int) -> float:
    """Learning rate of the update after `updates` updates, as in transformers' get_scheduler. It has no state."""
    if config.lr_scheduler_type == "constant":
        return config.learning_rate
    if updates < plan.warmup_steps:
        return config.learning_rate * (updates / plan.warmup_steps)
    after_warmup = max(1, plan.max_steps - plan.warmup_steps)
    share = {
        "constant_with_warmup": 1.0,
        "linear": (plan.max_steps - updates) / after_warmup,
        "cosine": 0.5 * (1 + math.cos(math.pi * ((updates - plan.warmup_steps) / after_warmup))),
    }
    return config.learning_rate * max(0.0, share[config.lr_scheduler_type])


class AdamW8bit(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) whose moments have 8 bits and, per block of 256, a float32 scale (arXiv:2110.02861).

    It computes in float32, with the moments as they are before they are rounded. Moments of parameters with fewer than
    4,096 elements, or with a number that is no multiple of 256, stay float32. Each process updates its own shard of
    a parameter, which blocks do not cross: with other shards, other numbers have a common scale.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **settings: Any):
        super().__init__(groups, {"weight_decay": 0.0} | settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    weights = own_shard(parameter).view(-1)
                    if not self.state[parameter]:
                        self.state[parameter] = _zero_moments(weights)
                    _step(weights, own_shard(parameter.grad).reshape(-1), self.state[parameter], group)


class OffloadedAdamW(torch.optim.AdamW):
    """torch's AdamW, whose moments rest in the host's memory."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        _step_one_by_one(self, super().step)


class OffloadedAdamW8bit(AdamW8bit):
    """AdamW8bit, whose moments rest in the host's memory."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        _step_one_by_one(self, super().step)


def _step_one_by_one(optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
    """Do `step` for one parameter after the other: its moments come to its device for that, and go back afterwards.

    The result is that of a step with all parameters, bit for bit: the same kernel gets the same numbers.
    """
    groups = optimizer.param_groups
    try:
        for group in groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    optimizer.param_groups = [{**group, "params": [parameter]}]
                    _step_with_moments(optimizer.state, parameter, step)
    finally:
        optimizer.param_groups = groups


def _step_with_moments(states: dict[Tensor, Any], parameter: Tensor, step: Callable[[], object]) -> None:
    resting = states.get(parameter, {})
    states[parameter] = {name: _to_device(parameter.device, value) for name, value in resting.items()}
    step()
    states[parameter] = {name: _to_host(value, resting.get(name)) for name, value in states[parameter].items()}


def _to_device(device: torch.device, value: Tensor) -> Tensor:
    """Move a moment or its scales to the device; the count of steps stays where it is."""
    return value.to(device, non_blocking=True) if value.ndim else value


def _to_host(value: Tensor, place: Tensor | None) -> Tensor:
    """Copy the value to its place in the host's memory, or to a new one, which is page-locked for a GPU."""
    if not value.ndim:
        return value
    if place is None:
        place = torch.empty_like(value, device=HOST, pin_memory=value.is_cuda)
    return place.copy_(value)


def _zero_moments(weights: Tensor) -> dict[str, Tensor]:
    """Return the state before the first step. A moment of 8 bits is a code per element, and a scale per block."""
    state = {"step": torch.zeros(())}  # on the CPU, so that reading it waits for no device
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = torch.zeros_like(weights)
        if len(weights) >= SMALLEST and len(weights) % BLOCK == 0:
            state[name] = torch.zeros_like(weights, dtype=torch.uint8)
            state[f"{name}_scale"] = weights.new_zeros(len(weights) // BLOCK)
    return state


def _step(weights: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """Update a parameter's weights and moments, some at a time: all moments of one in float32 would need what the 8
    bits save."""
    state["step"] += 1
    step, rate, (beta1, beta2) = int(state["step"]), group["lr"], group["betas"]
    for start in range(0, len(weights), TOGETHER):
        part = slice(start, start + TOGETHER)
        values, gradients = weights[part], gradient[part]
        first = _read(state, "exp_avg", part).lerp_(gradients, 1 - beta1)
        second = _read(state, "exp_avg_sq", part).mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
        _write(state, "exp_avg", part, first)
        _write(state, "exp_avg_sq", part, second)
        deviation = second.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
        values.mul_(1 - rate * group["weight_decay"]).addcdiv_(first, deviation, value=-rate / (1 - beta1**step))


def _read(state: dict[str, Tensor], name: str, part: slice) -> Tensor:
    """Return a part of a moment in float32: the moment's own memory, unless it has 8 bits."""
    found = state[name][part]
    if found.dtype != torch.uint8:
        return found
    values = _code_values(name, found.device).index_select(0, found.int())
    return (values.view(-1, BLOCK) * state[f"{name}_scale"][_blocks(part)][:, None]).flatten()


def _write(state: dict[str, Tensor], name: str, part: slice, values: Tensor) -> None:
    """Write a part of a moment: divide by the largest absolute value of the block, and round to the nearest code."""
    if state[name].dtype != torch.uint8:
        return  # `_read` gave the moment itself
    blocks = values.view(-1, BLOCK)
    scale = blocks.abs().amax(1)
    coded = _code_values(name, values.device)
    between = (coded[1:] + coded[:-1]) / 2
    relative = blocks / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    state[name][part] = torch.bucketize(relative.flatten(), between, out_int32=True).to(torch.uint8)
    state[f"{name}_scale"][_blocks(part)] = scale


def _blocks(part: slice) -> slice:
    return slice(part.start // BLOCK, part.stop // BLOCK)


@functools.cache
def _code_values(name: str, device: torch.device) -> Tensor:
    """Values that the 256 codes stand for, ascending: 0, 1, and in each of seven decades below 1 the middles of equal
    intervals, twice as many as in the decade before (the dynamic data type of arXiv:2110.02861). The second moment has
    no sign, and intervals of half the width."""
    signed = name == "exp_avg"
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade * (1 if signed else 2)
        middles = [(0.1 + 0.9 * (place + 0.5) / count) * 10.0 ** (decade - 6) for place in range(count)]
        values += [*middles, *(-value for value in middles if signed)]
    return torch.tensor(sorted(values), device=device)
