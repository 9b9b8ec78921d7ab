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


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile layers of one class when a pass of the policy first calls them; they share the compiled code.

    All sizes are dynamic, so that passes of other lengths are not compiled again. If torch's limit of compilations is
    reached all the same, layers run uncompiled from then on, which is printed.
    """
    given_up: list[str] = []
    for layer in layers:
        layer.forward = partial(_forward, layer.forward, torch.compile(layer.forward, dynamic=True), given_up)


@contextmanager
def compiled() -> Iterator[None]:
    """Inside, passes without a gradient run compiled code too, as those with one always do."""
    token = _scoring.set(True)
    try:
        yield
    finally:
        _scoring.reset(token)


def _forward(
    plain: Callable[..., Any], compiled: Callable[..., Any], given_up: list[str], *arguments: Any, **keys: Any
) -> Any:
    # With gradients: sampling has none, and what is computed again in a backward pass is outside of `compiled`.
    if given_up or not (torch.is_grad_enabled() or _scoring.get()):
        return plain(*arguments, **keys)
    try:
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            return compiled(*arguments, **keys)
    except FailOnRecompileLimitHit as error:
        given_up.append(str(error.__cause__ or error).split("\n\n")[0])
        print(f"train.torch_compile: layers run uncompiled from now on: {given_up[0]}", flush=True)
        return plain(*arguments, **keys)
