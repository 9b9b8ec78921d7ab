"""Drawing tokens from logits, each completion with its own stream of uniforms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_core.rollout.types import Request, Sampling

BLOCK = 128  # tokens


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw one token per row. Returns it and its log-probability at the sampling temperature. (B, V), (B,) → (B,), (B,)

    Min-p, top-k and top-p decide which tokens can be drawn, and the log-probability is over those.

    The token is the one at which the running sum of the probabilities passes the uniform. First the block is found,
    then the token in it: summing a whole vocabulary in float64, so that the sum does not reach a uniform below 1 too
    early, would take longer than all the rest of drawing.
    """
    rows, vocabulary = logits.shape
    if sampling.temperature not in (0, 1):
        logits = logits / sampling.temperature
    highest, token = logits.max(-1, keepdim=True)
    p = logits.new_zeros(rows, -(-vocabulary // BLOCK) * BLOCK)  # not normalised: the sums are known below
    torch.sub(logits, highest, out=p[:, :vocabulary]).exp_()
    blocks = p.unflatten(1, (-1, BLOCK))  # (B, V / BLOCK, BLOCK)
    sums = blocks.sum(-1).double().cumsum(-1)
    if sampling.temperature > 0:
        if sampling.is_truncated:
            _truncate(p[:, :vocabulary], sampling)
            sums = blocks.sum(-1).double().cumsum(-1)
        token = _search(blocks, sums, uniform[:, None].double() * sums[:, -1:]).clamp(max=vocabulary - 1)
    logprob = (logits.gather(1, token) - highest).double() - sums[:, -1:].log()
    return token.squeeze(1), logprob.squeeze(1).float()


def lowest_kept(logits: Tensor, sampling: Sampling) -> Tensor:
    """Lowest logit of a token that min-p, top-k and top-p leave; `logits`: at the sampling temperature.
    (N, V) → (N,)"""
    p = (logits - logits.amax(-1, keepdim=True)).exp()
    _truncate(p, sampling)
    return torch.where(p > 0, logits, torch.inf).amin(-1)


def penalise(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Return the logits after the repetition penalty on the tokens seen so far. (B, V), (B, V) bool → (B, V)"""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def _search(blocks: Tensor, sums: Tensor, target: Tensor) -> Tensor:
    """Find the token at which the running sum passes the target; `sums`: the sum over blocks. (B, 1) → (B, 1)"""
    # Only where probabilities are not finite does a search end past the last block; the caller refuses those.
    block = torch.searchsorted(sums, target, right=True).clamp(max=sums.shape[1] - 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    inner = blocks[torch.arange(len(blocks), device=blocks.device), block.squeeze(1)].double().cumsum(-1)  # (B, BLOCK)
    # Both sums round on their own: the rest must not pass the block's last token, nor fall on one without probability.
    rest = torch.minimum(target - before, inner[:, -1:] * (1 - 1e-12)).clamp(min=0)
    return block * BLOCK + torch.searchsorted(inner, rest, right=True)


def _truncate(p: Tensor, sampling: Sampling) -> None:
    """Set the probabilities that min-p, then top-k, then top-p leave out to 0, in place; one that equals the lowest of
    those that are left is left too. (B, V), the highest 1"""
    p.masked_fill_(p < sampling.min_p, 0)
    if not sampling.top_k and sampling.top_p == 1:
        return
    ordered = p.sort(descending=True).values[:, : sampling.top_k or None]
    if sampling.top_p < 1:
        before = ordered.cumsum(-1) - ordered
        drop = before >= sampling.top_p * ordered.sum(-1, keepdim=True)
        ordered = ordered.masked_fill(drop, torch.inf)
    p.masked_fill_(p < ordered.amin(-1, keepdim=True), 0)


def uniforms(requests: Sequence[Request], length: int) -> Tensor:
    """Return one stream of uniforms per completion, by the lower 32 bits of its seed. (B, length) float32 on the CPU"""
    seeds = [request.seed + i for request in requests for i in range(request.num_completions)]
    return torch.stack([torch.rand(length, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
