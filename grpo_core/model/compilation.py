"""torch.compile for decoder layers, in place: names, parameters and checkpoints stay what they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile layers of one class when they are first called; they share the compiled code.

    All sizes are dynamic, so that passes of other lengths are not compiled again. Calls with a key-value
    cache (sampling) run uncompiled.
    """
    for layer in layers:
        layer.forward = partial(_forward, layer.forward, torch.compile(layer.forward, dynamic=True))


def _forward(
    plain: Callable[..., Any], compiled: Callable[..., Any], *arguments: Any, past_key_values: Any = None, **keys: Any
) -> Any:
    if past_key_values is None:
        return compiled(*arguments, **keys)
    return plain(*arguments, past_key_values=past_key_values, **keys)
