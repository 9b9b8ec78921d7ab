"""A model of which each process holds a share: what those who compute with it have to do.

It is sharded from outside, by `model.parallelize`. Each layer gathers its weights while it computes; the others
(embedding, last norm, head) are gathered around a call of the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.distributed.fsdp import FSDPModule

T = TypeVar("T")


def is_sharded(model: Any) -> bool:
    """True if each process holds a share of the model's weights only."""
    return isinstance(_base(model), FSDPModule)


def within(model: Any, work: Callable[..., T], *arguments: Any) -> T:
    """`work(*arguments)` as if it were the model's forward pass: inside, what is not in a layer is whole, and may be
    called or read past the model. Of a sharded model all processes call it, and make the same calls inside."""
    root = _base(model)
    if not isinstance(root, FSDPModule):
        return work(*arguments)
    called: Any = root
    called.forward = work
    try:
        return called(*arguments)
    finally:
        del called.forward
        if not torch.is_grad_enabled():  # else the end of the backward pass does it
            root.reshard()


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model
