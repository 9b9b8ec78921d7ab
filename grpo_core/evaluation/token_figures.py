"""Figures of each token of completions under a saved policy, which need not have sampled them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from grpo_core.model.loading import load_model
from grpo_core.model.policy import Policy
from grpo_core.model.sequences import Sequences, pad


@torch.no_grad()
def token_figures(
    model: Path, samples: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float
) -> list[tuple[list[float], list[float]]]:
    """Log-probability of each token of the completions, and entropy at its place, in nats, under the policy with the
    weights in `model` at this temperature. `samples`: ids of prompt and completion."""
    policy = Policy(load_model(model).to("cuda" if torch.cuda.is_available() else "cpu").eval(), temperature)
    policy.refresh()
    found = []
    for prompt, completion in samples:
        sequence = Sequences(
            pad([[*prompt, *completion]], torch.int64),
            torch.tensor([len(prompt)]),
            torch.tensor([len(completion)]),
            torch.tensor([0]),
        )
        logprobs, entropy = policy(policy.prepare(sequence))
        found.append((logprobs[0].tolist(), entropy[0].tolist()))
    return found
