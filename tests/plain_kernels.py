"""Kernels that cannot run on a CPU, in plain torch: the same arguments and results, with all scores in memory."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from grpo_core.system.torch_releases import RELEASE


def plain_flex(scale: float, compiled: bool) -> Any:
    """Flex attention without a kernel: all scores."""

    def attention(query: Tensor, key: Tensor, value: Tensor, *, block_mask: Any) -> Tensor:
        places = torch.arange(query.shape[2], device=query.device)
        mask = block_mask.mask_mod(None, None, places[:, None], places)
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
        )

    return attention


def plain_varlen(
    query: Tensor,  # (N, H, d)
    key: Tensor,  # (M, K, d)
    value: Tensor,  # (M, K, d)
    query_starts: Tensor,
    key_starts: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    **given: Any,
) -> Tensor:
    """torch's varlen_attn without flash attention's kernel: all scores. The last query of a sequence sees its last key,
    as in torch.nn.attention.bias, which calls the same kernel for what it names LOWER_RIGHT."""
    assert window_size == (-1, 0)
    assert given.keys() <= inspect.signature(varlen_attn).parameters.keys()  # of the torch that is installed
    enable_gqa = given.get("enable_gqa", RELEASE < (2, 12))
    assert {query_starts.dtype, key_starts.dtype} == {torch.int32}
    if query.is_cuda:
        if query.dtype == torch.float32:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    else:
        assert (longest_query, longest_key) == (int(query_starts.diff().max()), int(key_starts.diff().max()))
        assert (len(query), len(key)) == (int(query_starts[-1]), int(key_starts[-1]))
    sequence, from_end = [], []
    for starts, count in ((query_starts, len(query)), (key_starts, len(key))):
        places = torch.arange(count, device=query.device)
        sequence.append(torch.bucketize(places, starts[1:], right=True))
        from_end.append(starts[1:][sequence[-1]] - places)
    mask = (sequence[0][:, None] == sequence[1]) & (from_end[0][:, None] <= from_end[1])
    rows = (x.transpose(0, 1)[None] for x in (query, key, value))
    mixed = nn.functional.scaled_dot_product_attention(*rows, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return mixed[0].transpose(0, 1)


def plain_statistics(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """`fused_logprobs._statistics` without Triton."""
    z = logits / temperature
    log_p, largest = z.log_softmax(-1), z.max(-1).values
    entropy = -(log_p.exp() * log_p).nan_to_num(0.0).sum(-1)
    return torch.stack([log_p.gather(1, targets[:, None])[:, 0], entropy, largest, z.logsumexp(-1) - largest])


def plain_gradient(
    logits: Tensor,
    into: Tensor,
    targets: Tensor,
    temperature: float,
    values: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
) -> None:
    """`fused_logprobs._compute_gradient` without Triton."""
    log_p = logits / temperature - (values[2] + values[3])[:, None]
    p = log_p.exp()
    gradient = torch.zeros_like(p)
    if grad_logprobs is not None:
        gradient = gradient - grad_logprobs[:, None] * p
        gradient.scatter_add_(1, targets[:, None], grad_logprobs[:, None])
    if grad_entropy is not None:
        gradient -= grad_entropy[:, None] * (p * (log_p + values[1][:, None])).nan_to_num(0.0)
    # oneDNN's product of bfloat16 reads one number behind a row of odd length: there may be a NaN in what logits were.
    logits.zero_()
    into.copy_(gradient / temperature)


def plain_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`fused_logprobs._add_product`, whose product of two dtypes torch has on a GPU only."""
    total.add_(a @ b)


def plain_norm(x: Tensor, weight: Tensor, eps: float, gemma: bool) -> Tensor:
    """`fused.kernels.norm` without Triton."""
    n = x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    return (n * (1 + weight.float()) if gemma else n.to(x.dtype).float() * weight.float()).to(x.dtype)


def plain_norm_backward(gradient: Tensor, x: Tensor, weight: Tensor, eps: float, gemma: bool) -> tuple[Tensor, Tensor]:
    """`fused.kernels.norm_backward` without Triton."""
    scale = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    n, g = x.float() * scale, gradient.float() * (weight.float() + gemma)
    of_x = scale * (g - n * (g * n).mean(-1, keepdim=True))
    return of_x.to(x.dtype), (gradient.float() * n).flatten(0, -2)


def plain_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    """`fused.kernels.rotate` without Triton."""
    turned = []
    for x in (q, k):
        first, second = x.float().chunk(2, -1)
        rotated = torch.cat([-second, first], -1) * sign * sin.float()[:, None]
        turned.append((x.float() * cos.float()[:, None] + rotated).to(x.dtype))
    return turned[0], turned[1]


def _activated(gate: Tensor, kind: str) -> Tensor:
    return nn.functional.silu(gate) if kind == "silu" else nn.functional.gelu(gate, approximate="tanh")


def plain_gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """`fused.kernels.gated` without Triton."""
    return (_activated(gate.float(), kind) * up.float()).to(gate.dtype)


def plain_gated_backward(gradient: Tensor, gate: Tensor, up: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """`fused.kernels.gated_backward` without Triton."""
    g, dy, factor = gate.float(), gradient.float(), 1.5957691216057308
    share = torch.sigmoid(g if kind == "silu" else factor * (g + 0.044715 * g**3))
    slope = 1.0 if kind == "silu" else factor * (1 + 3 * 0.044715 * g**2)
    of_gate = dy * up.float() * share * (1 + g * (1 - share) * slope)
    return of_gate.to(gate.dtype), (dy * g * share).to(gate.dtype)


def plain_attend_next(
    new: tuple[Tensor, Tensor, Tensor],
    prompts: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    group: Tensor,
    lengths: Tensor,
    first: Tensor,
    place: Tensor,
    scale: float,
) -> Tensor:
    """`fused.attention.attend_next` without Triton: all scores."""
    query, key, value = new
    own[0].index_copy_(2, place, key[:, :, None])
    own[1].index_copy_(2, place, value[:, :, None])
    keys, values = (torch.cat([x[group], y], dim=2) for x, y in zip(prompts, own, strict=True))
    of_prompt, of_own = (torch.arange(x[0].shape[2], device=key.device) for x in (prompts, own))
    seen = torch.cat([of_prompt < lengths[group, None], (of_own >= first[:, None]) & (of_own <= place)], dim=1)
    options = {"attn_mask": seen[:, None, None], "scale": scale, "enable_gqa": True}
    return nn.functional.scaled_dot_product_attention(query[:, :, None], keys, values, **options).squeeze(2)
