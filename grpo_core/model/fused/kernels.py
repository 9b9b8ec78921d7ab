"""RMS norm, rotation and gated activation by one Triton kernel each way, for a GPU.

torch's own operations pass over memory for each step of these, 8 times in a norm. All arithmetic here is in float32,
whatever the dtype; only results are rounded to it, and in a norm what its weight multiplies, as in transformers.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32
from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]
TILE = 4096  # elements that a program holds at a time
WARPS = 8
PROGRAMS = 1024  # that divide the rows of a norm's backward pass among them; each has its own sum for the weight
# Batches of other lengths must not compile a kernel again, as Triton makes it: see `fused_logprobs`.
VARY = ["rows", "tokens", "numbers", "q_batch", "k_batch", "q_programs", "angle_batch"]


class Norm(torch.autograd.Function):
    """n = x / √(mean x² + ε), times the weight; `gemma`: times 1 + weight, and n is not rounded before.

    Backward, with g = dy · weight: dx = (g − n · mean(g n)) / √(mean x² + ε), and dw = Σ dy n. n is made again."""

    @staticmethod
    def forward(
        ctx: Any, x: Float[Tensor, "*batch h"], weight: Float[Tensor, " h"], eps: float, gemma: bool
    ) -> Float[Tensor, "*batch h"]:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.how = eps, gemma
        return norm(x, weight, eps, gemma)

    @staticmethod
    def backward(ctx: Any, gradient: Float[Tensor, "*batch h"]) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = norm_backward(gradient.contiguous(), x, weight, *ctx.how)
        return of_x, of_weight.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None, None, None


class Rotation(torch.autograd.Function):
    """Rotate each pair (i, i + d/2) of a head by its token's angle; the gradient is rotated back."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Float[Tensor, "B H T d"],
        k: Float[Tensor, "B K T d"],
        cos: Float[Tensor, "b T d"],
        sin: Float[Tensor, "b T d"],
    ) -> tuple[Float[Tensor, "B H T d"], Float[Tensor, "B K T d"]]:
        ctx.save_for_backward(cos, sin)
        return rotate(q, k, cos, sin, 1.0)

    @staticmethod
    def backward(
        ctx: Any, of_q: Float[Tensor, "B H T d"], of_k: Float[Tensor, "B K T d"]
    ) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return *rotate(of_q, of_k, cos, sin, -1.0), None, None


class Gated(torch.autograd.Function):
    """activation(gate) · up, where activation(g) = g · σ(f(g)): SiLU has f(g) = g, GELU's approximation by tanh
    f(g) = √(8/π) (g + 0.044715 g³)."""

    @staticmethod
    def forward(ctx: Any, gate: Float[Tensor, " *n"], up: Float[Tensor, " *n"], kind: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return gated(gate.contiguous(), up.contiguous(), kind)

    @staticmethod
    def backward(ctx: Any, gradient: Float[Tensor, " *n"]) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        return *gated_backward(gradient.contiguous(), gate.contiguous(), up.contiguous(), ctx.kind), None


def norm(x: Float[Tensor, "*batch h"], weight: Float[Tensor, " h"], eps: float, gemma: bool) -> Tensor:
    out, width = torch.empty_like(x), x.shape[-1]
    rows, (tall, wide) = x.numel() // width, _tile(width)
    _norm_kernel[(triton.cdiv(rows, tall),)](x, weight, out, rows, width, eps, gemma, tall, wide, num_warps=WARPS)
    return out


def norm_backward(
    gradient: Float[Tensor, "*batch h"], x: Float[Tensor, "*batch h"], weight: Tensor, eps: float, gemma: bool
) -> tuple[Float[Tensor, "*batch h"], Float32[Tensor, "programs h"]]:
    """Return the gradient of x, and parts of the weight's, to be added."""
    out, width = torch.empty_like(x), x.shape[-1]
    rows, (tall, wide) = x.numel() // width, _tile(width)
    parts = torch.empty(min(triton.cdiv(rows, tall), PROGRAMS), width, device=x.device)
    _norm_backward_kernel[(len(parts),)](
        gradient, x, weight, out, parts, rows, width, eps, gemma, tall, wide, num_warps=WARPS
    )
    return out, parts


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sign: float) -> tuple[Tensor, Tensor]:
    """Return q and k rotated by their angles times the sign, laid out by token."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    cos, sin = cos.contiguous(), sin.contiguous()
    batch, _, tokens, size = q.shape
    turned = [x.new_empty(batch, tokens, x.shape[1], size).transpose(1, 2) for x in (q, k)]
    tall, half = _tile(size // 2)
    q_programs, k_programs = (triton.cdiv(x.numel() // size, tall) for x in (q, k))
    per_batch = 0 if len(cos) == 1 else tokens * size
    _rotate_kernel[(q_programs + k_programs,)](
        *(q, turned[0], *q.stride()[:3], q.shape[1], k, turned[1], *k.stride()[:3], k.shape[1]),
        *(cos, sin, sign, batch * tokens, tokens, per_batch, size, q_programs, tall, half),
        num_warps=WARPS,
    )
    return turned[0], turned[1]


def gated(gate: Tensor, up: Tensor, kind: Activation) -> Tensor:
    out = torch.empty_like(gate)
    _gated_kernel[(triton.cdiv(gate.numel(), TILE),)](
        gate, up, out, gate.numel(), kind == "silu", TILE, num_warps=WARPS
    )
    return out


def gated_backward(gradient: Tensor, gate: Tensor, up: Tensor, kind: Activation) -> tuple[Tensor, Tensor]:
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    _gated_backward_kernel[(triton.cdiv(gate.numel(), TILE),)](
        gradient, gate, up, of_gate, of_up, gate.numel(), kind == "silu", TILE, num_warps=WARPS
    )
    return of_gate, of_up


def _tile(width: int) -> tuple[int, int]:
    wide = triton.next_power_of_2(width)
    return max(1, TILE // wide), wide


@triton.jit(do_not_specialize=VARY)
def _norm_kernel(x, weight, out, rows, width, eps, GEMMA: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr):
    row, column = tl.program_id(0) * TALL + tl.arange(0, TALL), tl.arange(0, WIDE)
    places = row.to(tl.int64)[:, None] * width + column
    inside = (row < rows)[:, None] & (column < width)
    value = tl.load(x + places, mask=inside, other=0.0)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    wide = value.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 1) / width + eps)[:, None]
    wide = wide * (1.0 + w) if GEMMA else wide.to(value.dtype).to(tl.float32) * w
    tl.store(out + places, wide, mask=inside)


@triton.jit(do_not_specialize=VARY)
def _norm_backward_kernel(
    gradient,
    x,
    weight,
    out,
    parts,
    rows,
    width,
    eps,
    GEMMA: tl.constexpr,
    TALL: tl.constexpr,
    WIDE: tl.constexpr,
):
    column = tl.arange(0, WIDE)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    w += 1.0 if GEMMA else 0.0
    total = tl.zeros((WIDE,), tl.float32)
    for start in range(tl.program_id(0) * TALL, rows, tl.num_programs(0) * TALL):
        row = start + tl.arange(0, TALL)
        places = row.to(tl.int64)[:, None] * width + column
        inside = (row < rows)[:, None] & (column < width)
        n = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(n * n, 1) / width + eps)[:, None]
        n *= scale
        g = dy * w
        tl.store(out + places, scale * (g - n * (tl.sum(g * n, 1) / width)[:, None]), mask=inside)
        total += tl.sum(dy * n, 0)
    tl.store(parts + tl.program_id(0) * width + column, total, mask=column < width)


@triton.jit(do_not_specialize=VARY)
def _rotate_kernel(
    q,
    q_out,
    q_batch,
    q_head,
    q_token,
    q_heads,
    k,
    k_out,
    k_batch,
    k_head,
    k_token,
    k_heads,
    cos,
    sin,
    sign,
    rows,
    tokens,
    angle_batch,
    size,
    q_programs,
    TALL: tl.constexpr,
    HALF: tl.constexpr,
):
    program = tl.program_id(0)
    if program < q_programs:
        at = (program.to(tl.int64) * TALL + tl.arange(0, TALL))[:, None]
        place, head = at // q_heads, at % q_heads
        x = q + place // tokens * q_batch + head * q_head + place % tokens * q_token
        _rotate_rows(x, q_out + at * size, place, cos, sin, sign, rows, tokens, angle_batch, size, HALF)
    else:
        at = ((program - q_programs).to(tl.int64) * TALL + tl.arange(0, TALL))[:, None]
        place, head = at // k_heads, at % k_heads
        x = k + place // tokens * k_batch + head * k_head + place % tokens * k_token
        _rotate_rows(x, k_out + at * size, place, cos, sin, sign, rows, tokens, angle_batch, size, HALF)


@triton.jit
def _rotate_rows(x, out, place, cos, sin, sign, rows, tokens, angle_batch, size, HALF: tl.constexpr):
    pair, half = tl.arange(0, HALF), size // 2
    inside = (place < rows) & (pair < half)
    angle = place // tokens * angle_batch + place % tokens * size + pair
    c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32) * sign
    first = tl.load(x + pair, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + half + pair, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + pair, first * c - second * s, mask=inside)
    tl.store(out + half + pair, second * c + first * s, mask=inside)


@triton.jit
def _share(g, SILU: tl.constexpr):
    """σ(f(g))."""
    return tl.sigmoid(g) if SILU else tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))


@triton.jit(do_not_specialize=VARY)
def _gated_kernel(gate, up, out, numbers, SILU: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + place, mask=place < numbers, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=place < numbers, other=0.0).to(tl.float32)
    tl.store(out + place, g * _share(g, SILU) * u, mask=place < numbers)


@triton.jit(do_not_specialize=VARY)
def _gated_backward_kernel(gradient, gate, up, of_gate, of_up, numbers, SILU: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(gradient + place, mask=place < numbers, other=0.0).to(tl.float32)
    g = tl.load(gate + place, mask=place < numbers, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=place < numbers, other=0.0).to(tl.float32)
    share = _share(g, SILU)
    slope = 1.0 if SILU else 1.5957691216057308 * (1.0 + 3 * 0.044715 * g * g)  # f'(g)
    tl.store(of_gate + place, dy * u * share * (1.0 + g * (1.0 - share) * slope), mask=place < numbers)
    tl.store(of_up + place, dy * g * share, mask=place < numbers)
