"""Whether gradients are those of a plain pass, in the ways in which a policy computes them: tried on a few tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_core.errors import ConfigError
from grpo_core.model.capabilities import ROUNDING, decoder, random_ids
from grpo_core.model.sequences import Sequences
from grpo_core.model.sharded import is_sharded

PROBED = 2**17  # elements of the smallest trained parameters, whose gradients are compared
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}  # relative, between two ways to compute the same
SAME = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # between the same kernels on the same values


def why_not_packed(policy: Any) -> str:
    """Reason why packed passes give other gradients than padded rows; "" if they give the same."""
    if not (parameters := _parameters(policy)):
        return ""
    config, dtype = decoder(policy.model).config, parameters[0].dtype
    packed = _gradient(policy, parameters)
    policy.packs, usual = False, config._attn_implementation
    try:
        padded = _gradient(policy, parameters)
        difference, allowed = _difference(packed, padded), TOLERANCE[dtype]
        if not difference < allowed and dtype != torch.float32:  # rounding may send a token to other experts
            config._attn_implementation = "eager"
            allowed = max(allowed, ROUNDING * _difference(_gradient(policy, parameters), padded))
    finally:
        policy.packs, config._attn_implementation = True, usual
    return "" if difference < allowed else f"gradients differ by {difference:.2g}, and {allowed:.2g} is allowed"


def check_recomputing(policy: Any) -> None:
    """Raises ConfigError if recomputed activations change gradients."""
    if not (parameters := _parameters(policy)):
        return
    layers, policy.recomputed = policy.recomputed, 0
    kept = _gradient(policy, parameters)
    policy.recomputed = layers
    difference = _difference(_gradient(policy, parameters), kept)
    if not difference < SAME[parameters[0].dtype]:
        raise ConfigError(
            f"{type(policy.master).__name__} has other gradients when activations are computed again, by "
            f"{difference:.0%}: its layers do not give the same twice. Set train.gradient_checkpointing to false, with "
            "a smaller train.max_tokens_per_pass if memory runs out, or choose another model"
        )


def _parameters(policy: Any) -> list[Tensor]:
    """The smallest trained parameters: one at least, up to PROBED elements. None of a sharded model, whose gradients
    come in shards, nor of a frozen one."""
    if is_sharded(policy.master):
        return []
    trained = sorted((each for each in policy.model.parameters() if each.requires_grad), key=Tensor.numel)
    filled = torch.tensor([each.numel() for each in trained]).cumsum(0).tolist()
    return [each for place, each in enumerate(trained) if not place or filled[place] <= PROBED]


def _gradient(policy: Any, parameters: list[Tensor]) -> Tensor:
    """Gradient of a random projection of hidden states, of three completions of two prompts. (elements,)"""
    prompts, completions = torch.tensor([2, 2, 3]), torch.tensor([2, 3, 1])
    ids = random_ids(policy.model, (3, 5))
    ids[1, :2] = ids[0, :2]
    inputs = policy.prepare(Sequences(ids, prompts, completions, torch.tensor([0, 0, 1])))
    with torch.enable_grad(), policy.recomputing():
        states = policy.hidden_states(inputs.tokens)
        generator = torch.Generator().manual_seed(1)
        weights = torch.randn(states.shape, generator=generator).to(states.device)
        found = torch.autograd.grad((states.float() * weights).sum(), parameters, allow_unused=True)
    return torch.cat([each.float().flatten() for each in found if each is not None])


def _difference(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative to that of `expected`; 0 if both are 0."""
    return float((found - expected).norm() / expected.norm()) if expected.any() or found.any() else 0.0
