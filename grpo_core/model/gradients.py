"""Whether gradients are those of a plain pass, in the ways in which a policy computes them: tried on random tokens, as
many as the run's longest sequence has, or fewer with the model's own lengths shortened."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_core.errors import ConfigError
from grpo_core.model.capabilities import (
    LONGEST,
    PROBED,
    ROUNDING,
    probe_width,
    random_ids,
    shortened,
)
from grpo_core.model.sequences import Sequences

SHORTEST = 16  # tokens of a probe that are tried at least when memory runs out
COMPARED = 2**17  # elements of the smallest trained parameters, whose gradients are compared
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}  # relative, between two ways to compute the same
SAME = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # between the same kernels on the same values


def why_not_packed(policy: Any) -> str:
    """Reason why packed passes give other gradients than padded rows; "" if they give the same."""
    if not (parameters := _parameters(policy)):
        return ""
    config, dtype = policy.decoder.config, parameters[0].dtype
    packed = _gradient(policy, parameters, PROBED)
    policy.packs, usual = False, config._attn_implementation
    try:
        padded = _gradient(policy, parameters, PROBED)
        difference, allowed = _difference(packed, padded), TOLERANCE[dtype]
        if not difference < allowed and dtype != torch.float32:  # rounding may send a token to other experts
            config._attn_implementation = "eager"
            allowed = max(allowed, ROUNDING * _difference(_gradient(policy, parameters, PROBED), padded))
    finally:
        policy.packs, config._attn_implementation = True, usual
    return "" if difference < allowed else f"gradients differ by {difference:.2g}, and {allowed:.2g} is allowed"


def check_recomputing(policy: Any) -> None:
    """Raises ConfigError if recomputed activations change gradients. One sequence is tried, and where memory runs out,
    as it may have done before in the training, a shorter one: torch.OutOfMemoryError if there is no room for any."""
    if not (parameters := _parameters(policy)):
        return
    layers, longest = policy.recomputed, LONGEST
    while True:
        policy.recomputed = 0
        try:
            kept = _gradient(policy, parameters, longest, sequences=1)
            break
        except torch.OutOfMemoryError:
            if longest <= SHORTEST:
                raise
            longest //= 2
        finally:
            policy.recomputed = layers
    difference = _difference(_gradient(policy, parameters, longest, sequences=1), kept)
    if not difference < SAME[parameters[0].dtype]:
        raise ConfigError(
            f"{type(policy.master).__name__} has other gradients when activations are computed again, by "
            f"{difference:.0%}: its layers do not give the same twice. Set train.gradient_checkpointing to false, with "
            "a smaller train.max_tokens_per_pass if memory runs out, or choose another model"
        )


def _parameters(policy: Any) -> list[Tensor]:
    """The smallest trained parameters: one at least, up to COMPARED elements. None of a sharded model, whose gradients
    come in shards, nor of a frozen one."""
    if policy.is_sharded:
        return []
    trained = sorted((each for each in policy.model.parameters() if each.requires_grad), key=Tensor.numel)
    filled = torch.tensor([each.numel() for each in trained]).cumsum(0).tolist()
    return [each for place, each in enumerate(trained) if not place or filled[place] <= COMPARED]


def _gradient(policy: Any, parameters: list[Tensor], longest: int, sequences: int = 3) -> Tensor:
    """Gradient of a random projection of hidden states, of the first of three completions of two prompts. The first
    fills the run's longest sequence, or `longest` tokens that are to the model what it is. (elements,)"""
    width = probe_width(policy.decoder.config, policy.max_length, longest)
    prompt, completion = width // 2, width - width // 2
    prompts, completions = torch.tensor([prompt, prompt, min(prompt, 3)]), torch.tensor([completion, prompt, 1])
    ids = random_ids(policy.model, (3, width))
    ids[1, :prompt] = ids[0, :prompt]
    tried = (ids, prompts, completions, torch.tensor([0, 0, 1]))
    inputs = policy.prepare(Sequences(*(each[:sequences] for each in tried)))
    with shortened(policy.model, width, policy.max_length), torch.enable_grad(), policy.recomputing():
        states = policy.hidden_states(inputs.tokens)
        generator = torch.Generator().manual_seed(1)
        weights = torch.randn(states.shape, generator=generator).to(states.device)
        found = torch.autograd.grad((states.float() * weights).sum(), parameters, allow_unused=True)
    return torch.cat([each.float().flatten() for each in found if each is not None])


def _difference(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative to that of `expected`; 0 if both are 0."""
    return float((found - expected).norm() / expected.norm()) if expected.any() or found.any() else 0.0
