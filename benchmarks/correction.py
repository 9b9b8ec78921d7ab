"""Measures which sampling correction preserves the gradient, by length and staleness of the completions.

    python -m benchmarks.correction [--samples 512] [--rounds 4] [--tiny]

A small recurrent policy samples completions of a fixed length and then moves: along the signs of its gradient, as
AdamW's first steps do, until the KL divergence per token has the wanted value. The gradient of the moved policy is
estimated from the old completions under each correction, and compared with the gradient from many completions of its
own: by the cosine, and by the length along it (1 is right, near 0 has vanished). The reward is the share of some
tokens; its advantage is standardized. A second estimate, from as many completions of its own as there are old ones,
shows the sampling noise.
"""

from __future__ import annotations

import argparse
import copy
import json
from statistics import mean

import torch
from torch import Tensor, nn

from benchmarks.command import parse
from grpo_core.algorithm.losses import sampling_correction
from grpo_core.config.algorithm import AlgorithmConfig

VOCABULARY, HIDDEN = 32, 32
LENGTHS = (32, 256, 1024)
TINY = (8,)
KLS = (1e-4, 1e-3, 1e-2)  # nats per token
TRUTH = 8  # times as many completions for the true gradient
MODES = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.cell = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Log-probability of each token except the first. (B, T + 1) → (B, T)"""
        states, _ = self.cell(self.embedding(ids[:, :-1]))
        return self.head(states).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)

    @torch.no_grad()
    def sample(self, count: int, length: int) -> Tensor:
        """(count, length + 1); the first token is 0 for all."""
        ids, state = torch.zeros(count, 1, dtype=torch.int64), None
        parts = [ids]
        for _ in range(length):
            states, state = self.cell(self.embedding(parts[-1]), state)
            parts.append(torch.multinomial(self.head(states[:, 0]).softmax(-1), 1))
        return torch.cat(parts, dim=1)


def gradient(policy: Policy, ids: Tensor, weights: Tensor | float = 1.0) -> Tensor:
    """Gradient of the mean advantage-weighted log-probability per token; each token's or completion's term counts
    `weights` times."""
    share = (ids[:, 1:] < VOCABULARY // 4).float().mean(1, keepdim=True)
    advantages = (share - share.mean()) / share.std()
    loss = (weights * advantages * policy(ids)).mean()
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(policy.parameters()))])


@torch.no_grad()
def moved(policy: Policy, along: Tensor, kl: float, length: int) -> Policy:
    """Policy after a step that changes it by `kl` nats per token of its own completions."""
    ids = policy.sample(256, length)
    old, low, high = policy(ids), 0.0, 1.0
    for _ in range(14):
        size, new = (low + high) / 2, copy.deepcopy(policy)
        start = 0
        for parameter in new.parameters():
            parameter.add_(along[start : start + parameter.numel()].sign().view_as(parameter), alpha=size)
            start += parameter.numel()
        ratio = new(ids) - old
        low, high = (size, high) if (ratio.exp() - 1 - ratio).mean().item() < kl else (low, size)
    return new


def compare(length: int, kl: float, samples: int) -> dict[str, tuple[float, float]]:
    """Cosine and length of the gradient under each correction."""
    old = Policy()
    with torch.no_grad():
        old.head.weight *= 4  # makes the policy less uniform
    new = moved(old, gradient(old, old.sample(samples, length)), kl, length)
    truth = torch.stack([gradient(new, new.sample(samples, length)) for _ in range(TRUTH)]).mean(0)
    ids = old.sample(samples, length)
    with torch.no_grad():
        now, then = new(ids), old(ids)
    found = {"own completions": gradient(new, new.sample(samples, length)), "none": gradient(new, ids)}
    for mode in MODES[1:]:
        config = AlgorithmConfig.model_validate({"vllm_importance_sampling_mode": mode})
        found[mode] = gradient(new, ids, sampling_correction(now, then, torch.ones_like(now), config))
    return {
        name: (
            torch.cosine_similarity(each, truth, dim=0).item(),
            (each @ truth / truth.square().sum()).item(),
        )
        for name, each in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=4, help="policies per row; default 4")
    options = parse(parser, writes=True)
    rows = []
    for length in TINY if options.tiny else LENGTHS:
        for kl in KLS:
            found = []
            for seed in range(options.rounds):
                torch.manual_seed(seed)
                found.append(compare(length, kl, options.samples))
            cosine, along = (
                {name: round(mean(each[name][place] for each in found), 3) for name in found[0]} for place in (0, 1)
            )
            rows.append({"length": length, "kl_per_token": kl, "cosine": cosine, "length_along": along})
            print(json.dumps(rows[-1]), flush=True)
    document = {"samples": options.samples, "rounds": options.rounds, "rows": rows}
    (options.output / "correction.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
