"""Log-probabilities and entropies on a GPU: matrix products by torch, and one pass over a chunk's logits by Triton.

Functions of single logits are bound by memory, and torch's own operations pass over them many times. Here the forward
pass reads a chunk's logits once; the backward pass makes them again and writes their gradient over them. Logits are
float32; their gradient has the dtype of the hidden states, with which it is multiplied next.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int
from torch import Tensor

from grpo_core.config.memory_bounds import chunk_tokens
from grpo_core.model.logprobs import Floor, float32_product, leave_out, lowest_logits

BLOCK = 8192  # logits of a row that a program holds at a time
WARPS = 16
# What varies within a training must not be part of a compiled kernel, as Triton makes it: whether a number is 1 or a
# multiple of 16, and whether an address is one. Those of logits, for all of which the vocabulary is the same, stay.
_compiled_once = triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["targets", "values", "grad_logprobs", "grad_entropy"],
)


class FusedLogprobs(torch.autograd.Function):
    """`chosen_logprobs` for a GPU."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "N h"],
        weight: Float[Tensor, "V h"],
        targets: Int[Tensor, " N"],
        temperature: float,
        floor: Floor | None,
    ) -> tuple[Float32[Tensor, " N"], Float32[Tensor, " N"]]:
        ctx.set_materialize_grads(False)
        values, lowest = torch.empty(4, len(targets), device=hidden.device), list[Tensor | None]()
        for part in _chunks(targets, weight):
            logits = float32_product(hidden[part], weight)
            lowest.append(lowest_logits(logits, temperature, floor))
            values[:, part] = _statistics(leave_out(logits, targets[part], lowest[-1]), targets[part], temperature)
            del logits  # before there are those of the next chunk
        ctx.save_for_backward(hidden, weight, targets, values)
        ctx.temperature, ctx.lowest = temperature, lowest
        logprobs, entropy = values[:2].clone()
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Float32[Tensor, " N"] | None, grad_entropy: Float32[Tensor, " N"] | None
    ) -> tuple[Float[Tensor, "N h"], Float[Tensor, "V h"] | None, None, None, None]:
        hidden, weight, targets, values = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)  # the sum over the chunks
        for part, lowest in zip(_chunks(targets, weight), ctx.lowest, strict=True):
            given = (None if grad is None else grad[part] for grad in (grad_logprobs, grad_entropy))
            logits = leave_out(float32_product(hidden[part], weight), targets[part], lowest)
            gradient = _write_over(logits, hidden.dtype)
            _compute_gradient(logits, gradient, targets[part], ctx.temperature, values[:, part], *given)
            torch.mm(gradient, weight, out=grad_hidden[part])
            if grad_weight is not None:
                _add_product(grad_weight, gradient.T, hidden[part])
            del logits, gradient  # before there are those of the next chunk
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _chunks(targets: Tensor, weight: Tensor) -> list[slice]:
    size = chunk_tokens("cuda", len(weight))
    return [slice(start, start + size) for start in range(0, len(targets), size)]


def _add_product(total: Float32[Tensor, "V h"], a: Float[Tensor, "V n"], b: Float[Tensor, "n h"]) -> None:
    """total += a b by one product: its float32 sums are added in place, with no V · h result of its own."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def compile_kernels(vocabulary: int, dtype: torch.dtype, device: torch.device, *, entropy_gradient: bool) -> None:
    """Compile what a training's passes with states of this dtype need, which takes up to a second if it is not in
    Triton's cache; `entropy_gradient`: of some passes."""
    logits, one = torch.zeros(1, vocabulary, device=device), torch.zeros(1, device=device)
    targets = torch.zeros(1, dtype=torch.int64, device=device)
    values = _statistics(logits, targets, 1.0)
    for grad_entropy in (None, one) if entropy_gradient else (None,):
        _compute_gradient(logits, _write_over(logits, dtype), targets, 1.0, values, one, grad_entropy)


def _write_over(logits: Float32[Tensor, "N V"], dtype: torch.dtype) -> Float[Tensor, "N V"]:
    """Return the memory of the logits as numbers of this dtype: each row begins where its logits begin."""
    return logits.view(dtype)[:, : logits.shape[1]]


def _statistics(
    logits: Float32[Tensor, "N V"], targets: Int[Tensor, " N"], temperature: float
) -> Float32[Tensor, "4 N"]:
    """Return logp, the entropy H, the largest z, the log of Σ_j exp(z_j − largest), where z = logits / temperature."""
    rows, vocabulary = logits.shape
    values = torch.empty(4, rows, device=logits.device)
    _statistics_kernel[(rows,)](logits, targets, 1 / temperature, values, rows, vocabulary, BLOCK, num_warps=WARPS)
    return values


def _compute_gradient(
    logits: Float32[Tensor, "N V"],
    gradient: Float[Tensor, "N V"],
    targets: Int[Tensor, " N"],
    temperature: float,
    values: Float32[Tensor, "4 N"],
    grad_logprobs: Float32[Tensor, " N"] | None,
    grad_entropy: Float32[Tensor, " N"] | None,
) -> None:
    """Write the gradient of the logits, by ∂logp/∂z_j = [j = t] − p_j and ∂H/∂z_j = −p_j (log p_j + H), into
    `gradient`, which is in their own memory (`_write_over`). `values`: of `_statistics`."""
    rows, vocabulary = logits.shape
    given = [None if grad is None else grad.contiguous() for grad in (grad_logprobs, grad_entropy)]
    _gradient_kernel[(rows,)](
        logits,
        gradient,
        gradient.stride(0),
        targets,
        1 / temperature,
        values.contiguous(),
        *given,
        rows,
        vocabulary,
        BLOCK,
        num_warps=WARPS,
    )


@_compiled_once
def _statistics_kernel(logits, targets, scale, values, rows, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    largest, total, weighted = -1e38, 0.0, 0.0  # of the columns so far: max z, Σ e^(z − max), Σ e^(z − max) (z − max)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = tl.load(logits + columns, mask=columns < vocabulary, other=float("-inf")) * scale
        new = tl.maximum(largest, tl.max(z, 0))
        p = tl.exp(z - new)
        shrunk = tl.exp(largest - new)
        weighted = shrunk * (weighted + total * (largest - new)) + tl.sum(tl.where(p > 0, p * (z - new), 0.0), 0)
        total = shrunk * total + tl.sum(p, 0)
        largest = new
    z = tl.load(logits + tl.load(targets + row)) * scale
    tl.store(values + row, z - largest - tl.log(total))
    tl.store(values + rows + row, tl.log(total) - weighted / total)
    tl.store(values + 2 * rows + row, largest)
    tl.store(values + 3 * rows + row, tl.log(total))


@_compiled_once
def _gradient_kernel(
    logits, gradient, stride, targets, scale, values, grad_logprobs, grad_entropy, rows, vocabulary, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    gradient += row * stride
    target = tl.load(targets + row)
    entropy, largest = tl.load(values + rows + row), tl.load(values + 2 * rows + row)
    log_total = tl.load(values + 3 * rows + row)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = tl.load(logits + columns, mask=columns < vocabulary, other=float("-inf")) * scale
        # The gradient of column j lies where the logits of columns up to j lay: all threads have read theirs first.
        tl.debug_barrier()
        log_p = z - largest - log_total
        p = tl.exp(log_p)
        grad = tl.zeros_like(p)
        if grad_logprobs is not None:
            grad += tl.load(grad_logprobs + row) * (tl.where(columns == target, 1.0, 0.0) - p)
        if grad_entropy is not None:
            grad -= tl.load(grad_entropy + row) * tl.where(p > 0, p * (log_p + entropy), 0.0)
        tl.store(gradient + columns, grad * scale, mask=columns < vocabulary)
