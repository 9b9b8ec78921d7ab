"""A frozen base whose linear layers have 4 bits per weight (QLoRA, arXiv:2305.14314): nf4 with double quantisation.

bitsandbytes quantises the layers as they are loaded, and computes with the weights that the codes stand for. Embedding,
head and norms keep their precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig


def nf4_config(dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return transformers' configuration for loading a 4-bit model that computes in this dtype."""
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def keep_gradients(model: nn.Module) -> None:
    """Make 4-bit layers on a CPU always pass gradients on: with AVX512-BF16, bitsandbytes packs the weights of a model
    in evaluation mode for a kernel that computes in bfloat16 and gives no gradient."""
    for layer in _layers(model):
        layer.support_avx512bf16_for_cpu = False


@contextmanager
def computing_in_float32(model: nn.Module) -> Iterator[None]:
    """Inside, 4-bit layers compute in float32 with the values that their codes stand for."""
    layers = _layers(model)
    own = [layer.compute_dtype for layer in layers]
    for layer in layers:
        layer.compute_dtype = torch.float32
    try:
        yield
    finally:
        for layer, dtype in zip(layers, own, strict=True):
            layer.compute_dtype = dtype


@torch.no_grad()
def dequantised(tensor: Tensor) -> Tensor:
    """Return the weights that 4-bit codes stand for, in the dtype that they were quantised from; others unchanged."""
    state = getattr(tensor, "quant_state", None)
    if state is None:
        return tensor
    from bitsandbytes.functional import dequantize_4bit

    return nn.Parameter(dequantize_4bit(tensor.data, state), requires_grad=False)


@torch.no_grad()
def take_dequantised(plain: nn.Module, quantised: nn.Module) -> None:
    """Give a plain model the weights that the codes of its 4-bit twin stand for; the others stay as they are."""
    for name, parameter in quantised.named_parameters():
        if hasattr(parameter, "quant_state"):
            plain.get_parameter(name).copy_(dequantised(parameter))


def is_quantised(model: nn.Module) -> bool:
    """True if linear layers of the model have 4-bit weights."""
    return bool(_layers(model))


def _layers(model: nn.Module) -> list[Any]:
    return [
        module
        for module in model.modules()
        if hasattr(getattr(module, "weight", None), "quant_state") and hasattr(module, "compute_dtype")
    ]
