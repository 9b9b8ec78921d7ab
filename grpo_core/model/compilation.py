"""torch.compile for decoder layers, in place: names, parameters and checkpoints stay what they are.

Only a policy's own passes run compiled code: training, and scoring. Sampling with the same model, whose cache differs
from layer to layer and from step to step, would be compiled again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit

_scoring = ContextVar("_scoring", default=False)


def compile_layers(layers: Iterable[nn.Module]) -> list[str]:
    """Compile layers of one class when a pass of the policy first calls them; they share the compiled code.

    All sizes are dynamic, so that passes of other lengths are not compiled again. If torch's limit of compilations is
    reached all the same, the layers that need one more run uncompiled from then on, which is printed, and is in the
    list that is returned; others stay as they are, since what a backward pass computes again must be the same.
    """
    given_up: list[str] = []
    for layer in layers:
        compiled = torch.compile(layer.forward, dynamic=True)
        layer.forward = partial(_forward, layer, layer.forward, compiled, given_up)
    return given_up


@contextmanager
def compiled() -> Iterator[None]:
    """Inside, passes without a gradient run compiled code too, as those with one always do."""
    token = _scoring.set(True)
    try:
        yield
    finally:
        _scoring.reset(token)


def _forward(
    layer: nn.Module,
    plain: Callable[..., Any],
    compiled: Callable[..., Any],
    given_up: list[str],
    *arguments: Any,
    **keys: Any,
) -> Any:
    # With gradients: sampling has none, and what is computed again in a backward pass is outside of `compiled`.
    if not (torch.is_grad_enabled() or _scoring.get()):
        return plain(*arguments, **keys)
    try:
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            return compiled(*arguments, **keys)
    except FailOnRecompileLimitHit as error:
        layer.forward = plain
        if not given_up:
            why, *_ = str(error.__cause__ or error).split("\n\n")
            given_up.append(f"layers run uncompiled: {why}")
            print(f"train.torch_compile: from now on {given_up[0]}", flush=True)
        return plain(*arguments, **keys)
