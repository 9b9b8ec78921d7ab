"""A model sharded from outside: each process holds a shard of every weight, gradient and optimizer state.

A layer's weights are gathered while it computes and given back after it, in the forward and in the backward pass; its
gradient is summed straight into the shards (FSDP2, torch's `fully_shard`; ZeRO stage 3, arXiv:1910.02054). What is not
in a layer (embedding, last norm, head) is one more unit, gathered around a call of the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_core.config.training import TrainConfig
from grpo_core.distributed import shard_mesh
from grpo_core.errors import TrainingError
from grpo_core.system.torch_releases import leave_forward

T = TypeVar("T")


def sharding(config: TrainConfig, *, frozen: bool) -> Callable[[Any], None] | None:
    """Return the function that shards a model before its weights are loaded; None if the configuration asks for none.

    `config`: with its precision resolved. In bf16 the weights are gathered in bfloat16, and gradients are summed in
    float32. `frozen`: the model gets no gradients. Raises TrainingError for a model without layers that can be
    gathered one by one.
    """
    if config.sharding == "none":
        return None
    mesh = shard_mesh(within_machine=config.sharding == "hybrid")
    dtype = torch.bfloat16 if config.mixed_precision == "bf16" else None
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)

    def shard(model: Any) -> None:
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise TrainingError(
                f"train.sharding={config.sharding!r}: {type(model).__name__} has no layers that transformers names as "
                "such, so its weights could only be gathered all at the same time; set train.sharding to 'none', or "
                "take another model"
            )
        model.tie_weights()  # which transformers does after loading: a head that is tied later is sharded twice
        model.requires_grad_(not frozen)
        for module in (*layers, model):
            fully_shard(module, mesh=mesh, mp_policy=precision)

    return shard


def is_sharded(model: Any) -> bool:
    """True if each process holds only a shard of the model's weights."""
    return isinstance(_base(model), FSDPModule)


def call_as_forward(model: Any, work: Callable[..., T], *arguments: Any) -> T:
    """Call `work(*arguments)` as if it were the model's forward pass: inside, weights outside the layers are whole, and
    may be used directly. With a sharded model all processes call it, and make the same calls inside."""
    root = _base(model)
    if not isinstance(root, FSDPModule):
        return work(*arguments)
    called: Any = root
    called.forward = lambda _, *given: work(*given)
    try:
        found = _call(root, called, None, *arguments)  # on a GPU, torch 2.11 refuses a call without any
    finally:
        del called.forward
    _give_back(model)
    return found


def forward(model: Any, **inputs: Any) -> Any:
    """Run the model's own forward pass. With a sharded model all processes call it."""
    found = _call(_base(model), model, **inputs)
    _give_back(model)
    return found


def _call(root: Any, call: Callable[..., T], *arguments: Any, **inputs: Any) -> T:
    """Return the result of a call that gathers the root's weights, which are still whole then."""
    try:
        return call(*arguments, **inputs)
    except BaseException:
        if isinstance(root, FSDPModule):
            leave_forward(root)
        raise


def _give_back(model: Any) -> None:
    """Let each process hold its shard alone again. With gradients, that happens at the end of the backward pass."""
    root = _base(model)
    if isinstance(root, FSDPModule) and not torch.is_grad_enabled():
        root.reshard()


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model
