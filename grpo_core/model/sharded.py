"""Computing with a sharded model.

It is sharded from outside, by `model.parallelize`. Each layer gathers its weights while it computes; the others
(embedding, last norm, head) are gathered around a call of the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.distributed.fsdp import FSDPModule

from grpo_core.system.torch_releases import leave_forward

T = TypeVar("T")


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
        return _call_and_reshard(root, called, None, *arguments)  # on a GPU, torch 2.11 refuses a call without any
    finally:
        del called.forward


def forward(model: Any, **inputs: Any) -> Any:
    """Run the model's own forward pass. With a sharded model all processes call it."""
    root = _base(model)
    return _call_and_reshard(root, model, **inputs) if isinstance(root, FSDPModule) else model(**inputs)


def _call_and_reshard(root: FSDPModule, call: Callable[..., T], *arguments: Any, **inputs: Any) -> T:
    """Return the result of a call that gathers the root's weights. They are given back after it or, with gradients, at
    the end of the backward pass."""
    try:
        found = call(*arguments, **inputs)
    except BaseException:
        leave_forward(root)
        raise
    if not torch.is_grad_enabled():
        root.reshard()
    return found


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model
