"""Speculation by n-grams in vLLM: what it needs on a CPU, and how a server was started with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def repair_expansion() -> None:
    """Let temperature, top_k and top_p reach guessed tokens, from now on in this process. On a CPU without Triton, vLLM
    0.32 expands them into a copy that it drops, and samples with what was in memory. Does nothing on a GPU."""
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = _expand


def _expand(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """Repeat each request's value, `x` (B,), for its guessed tokens (num_tokens,), whose running count is
    `cu_num_tokens` (B,)."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)


def speculation_of(config: Any) -> dict[str, Any] | None:
    """The keys of `rollout.vllm_args.speculative_config` with which vLLM was started; None without speculation."""
    names = ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
    return {name: getattr(config, name) for name in names} if config else None
