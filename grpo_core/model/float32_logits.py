"""Logits in float32 from states and weights in bfloat16.

A logit of 20 in bfloat16 is off by up to 0.06, and so is the log-probability that is computed from it. The products of
bfloat16 numbers are summed in float32 anyway: here the sums are kept as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

CAST = 2**20  # elements of a weight that a CPU converts together, so that they are still near when they are multiplied


def float32_product(hidden: Float[Tensor, "N h"], weight: Float[Tensor, "V h"]) -> Float32[Tensor, "N V"]:
    """h Wᵀ of numbers of one dtype, with float32 results.

    On a CPU, whose product of bfloat16 gives bfloat16 only, parts of the weight are converted: that takes about twice
    as long with AVX512-BF16.
    """
    if hidden.dtype == weight.dtype == torch.float32:
        return hidden @ weight.T
    if hidden.device.type != "cpu":
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    logits = torch.empty(len(hidden), len(weight))
    hidden, rows = hidden.float(), max(1, CAST // weight.shape[1])
    for start in range(0, len(weight), rows):
        part = weight[start : start + rows]
        torch.mm(hidden, part.float().T, out=logits[:, start : start + rows])
    return logits


class Float32Logits(nn.Linear):
    """An output layer whose results are float32 whatever its dtype."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype == self.weight.dtype == torch.float32:
            return super().forward(input)
        logits: Any = _Product.apply(input.flatten(0, -2), self.weight)
        logits = logits.view(*input.shape[:-1], -1)
        return logits if self.bias is None else logits + self.bias.float()


class _Product(torch.autograd.Function):
    """`float32_product` with gradients, whose products have the dtype of the states and weights."""

    @staticmethod
    def forward(ctx: Any, hidden: Float[Tensor, "N h"], weight: Float[Tensor, "V h"]) -> Float32[Tensor, "N V"]:
        ctx.save_for_backward(hidden, weight)
        return float32_product(hidden, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Float32[Tensor, "N V"]) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        gradient = gradient.to(hidden.dtype)
        return (
            gradient @ weight if ctx.needs_input_grad[0] else None,
            gradient.T @ hidden if ctx.needs_input_grad[1] else None,
        )


def make_logits_float32(model: Any) -> None:
    """Let the model's own passes give float32 logits, also those that it scales or caps. A model whose output layer is
    not a linear one is left as it is."""
    layer = model.get_output_embeddings()
    if type(layer) is nn.Linear:
        layer.__class__ = Float32Logits


def gives_float32_logits(model: Any) -> bool:
    """True after `make_logits_float32`, also if the layer is under an adapter by now."""
    layer = model.get_output_embeddings()
    for wrapped in ("original_module", "base_layer"):
        layer = getattr(layer, wrapped, layer)
    return isinstance(layer, Float32Logits)
