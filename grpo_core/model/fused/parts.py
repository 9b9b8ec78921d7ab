"""Which parts of a decoder the kernels compute: found out by trying each on random numbers, not by a list of names.

Norms, rotations and gated MLPs are replaced in the model at hand. What no kernel matches stays as it is, and is said.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_core.model import logprobs
from grpo_core.model.capabilities import TOLERANCE, probe_padded, relative_difference, shown, why_not_same

Undo = Callable[[], None]
ROTATION = "apply_rotary_pos_emb"  # in the module of each of transformers' architectures


def fuse(policy: Any) -> list[str]:
    """Let kernels compute the policy's norms, rotations and gated MLPs, if its states and gradients then stay as they
    are. Returns a sentence for each part that stays plain."""
    if not _fits(next(policy.model.parameters())):
        return []
    if policy.is_sharded:
        return ["layers of a sharded model are computed by torch's own operations"]
    before, undo = probe_padded(policy), list[Undo]()
    plain = dict(_fuse_parts(policy.decoder, undo))
    why_not = why_not_same(policy, before, policy.decoder.dtype) if undo else ""
    if why_not:
        for restore in undo:
            restore()
        return [f"all layers are computed by torch's own operations: with kernels, {why_not}"]
    return [f"{name} is computed by torch's own operations: {reason}" for name, reason in plain.items() if reason]


def _fuse_parts(inner: Any, undo: list[Undo]) -> Iterator[tuple[str, str]]:
    """Replace what a kernel matches. Gives the name of each kind of part, and why it stays plain or ""."""
    found: dict[Any, tuple[Any, str]] = {}  # the kernel's option that fits, and why none does, by kind
    for module in inner.modules():
        kind, name = type(module), type(module).__name__
        if name.endswith("RMSNorm") and [key for key, _ in module.named_parameters()] == ["weight"]:
            key = kind, module.weight.shape
            if key not in found:
                options = {gemma: partial(_norm, module, gemma) for gemma in (False, True)}
                found[key] = _first_match(module, options, [_random(module.weight, len(module.weight))])
            replaced, why_not = _normed, found[key][1]
        elif name.endswith("MLP"):
            key = kind
            if key not in found:
                options = {activation: partial(_mlp, module, activation) for activation in ("silu", "gelu_tanh")}
                given = [_random(next(inner.parameters()), inner.config.hidden_size)]
                found[key] = _first_match(module, options, given)
                if not all(hasattr(module, f"{part}_proj") for part in ("gate", "up", "down")):
                    found[key] = None, "it has no gate_proj, up_proj and down_proj"
            replaced, why_not = _gated, found[key][1]
        elif name.endswith("Attention") and hasattr(home := sys.modules[kind.__module__], ROTATION):
            if kind not in found:
                found[kind] = _fuse_rotation(home, inner, undo)
                yield f"{ROTATION} of {name}", found[kind][1]
            continue
        else:
            continue
        yield name, why_not
        if not why_not:
            module.forward = partial(replaced, module, module.forward, found[key][0])
            undo.append(partial(_restore, module))


def _restore(module: Any) -> None:
    own = module.forward.args[1]
    del module.forward
    if getattr(own, "__func__", None) is not type(module).forward:
        module.forward = own


def _fuse_rotation(home: Any, inner: Any, undo: list[Undo]) -> tuple[bool, str]:
    own = getattr(home, ROTATION)
    if getattr(own, "func", None) is _rotated:  # for another model of the process
        return True, ""
    like, size = next(inner.parameters()), getattr(inner.config, "head_dim", None) or 16
    angles = torch.arange(3 * size // 2, device=like.device).view(1, 3, -1).repeat(1, 1, 2)
    cos, sin = angles.cos().to(like.dtype), angles.sin().to(like.dtype)
    q, k = (_random(like, heads, 3, size) for heads in (4, 2))

    def tried(rotation: Any, q: Tensor, k: Tensor) -> Tensor:
        return torch.cat(rotation(q, k, cos, sin), dim=1)

    _, why_not = _first_match(partial(tried, own), {True: partial(tried, _rotation)}, [q, k])
    if not why_not:
        setattr(home, ROTATION, partial(_rotated, own))
        undo.append(partial(setattr, home, ROTATION, own))
    return not why_not, why_not


def _random(like: Tensor, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, *shape, generator=generator).to(like.device, like.dtype)


@torch.enable_grad()
def _first_match(plain: Any, options: Mapping[Any, Callable[..., Tensor]], given: list[Tensor]) -> tuple[Any, str]:
    """Return the first option whose result, and whose gradients of what is given, are the plain ones; or why none
    is. Raises torch.OutOfMemoryError if memory runs out, which says nothing about the model."""

    def figures(function: Callable[..., Tensor]) -> Tensor:
        inputs = [x.clone().requires_grad_() for x in given]
        out = function(*inputs)
        gradients = torch.autograd.grad(out, inputs, out.detach().cos())
        return torch.cat([x.detach().float().flatten() for x in (out, *gradients)])

    why_not = ""
    try:
        expected = figures(plain)
        for option, function in options.items():
            difference, allowed = relative_difference(figures(function), expected), TOLERANCE[given[0].dtype]
            if difference < allowed:
                return option, ""
            why_not = f"a kernel's result differs by {difference:.2g}, and {allowed:.2g} is allowed"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever another architecture, or Triton's compiler, raises
        why_not = shown(error)
    return None, why_not


def _norm(module: Any, gemma: bool, x: Tensor) -> Tensor:
    from grpo_core.model.fused.kernels import Norm

    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return Norm.apply(x, module.weight, eps, gemma)


def _mlp(module: Any, activation: str, x: Tensor) -> Tensor:
    from grpo_core.model.fused.kernels import Gated

    return module.down_proj(Gated.apply(module.gate_proj(x), module.up_proj(x), activation))


def _rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    from grpo_core.model.fused.kernels import Rotation

    return Rotation.apply(q, k, cos, sin)


def _normed(module: Any, own: Any, gemma: bool, x: Tensor) -> Tensor:
    return _norm(module, gemma, x) if _fits(x) and x.dtype == module.weight.dtype else own(x)


def _gated(module: Any, own: Any, activation: str, x: Tensor) -> Tensor:
    return _mlp(module, activation, x) if _fits(x) else own(x)


def _rotated(own: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any, **options: Any) -> Any:
    same = cos.ndim == 3 and cos.shape[-1] == q.shape[-1] == k.shape[-1] and not (more or options)
    return _rotation(q, k, cos, sin) if same and _fits(q) else own(q, k, cos, sin, *more, **options)


def _fits(x: Tensor) -> bool:
    return x.device.type in logprobs.FUSED
