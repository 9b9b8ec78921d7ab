"""torch.compile for decoder layers, in place: names, parameters and checkpoints stay what they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Let layers of one class compute by compiled code, which they share, when first called.

    All sizes are dynamic, so that passes of other lengths are not compiled again. Sampling, which is a call with a
    key-value cache, is left as it is.
    """
    for layer in layers:
        layer.forward = partial(_forward, layer.forward, torch.compile(layer.forward, dynamic=True))


def _forward(
    plain: Callable[..., Any], compiled: Callable[..., Any], *arguments: Any, past_key_values: Any = None, **keys: Any
) -> Any:
    if past_key_values is None:
        return compiled(*arguments, **keys)
    return plain(*arguments, past_key_values=past_key_values, **keys)
