"""The trainer's weights straight into a vLLM engine of the same process: one pass of copies, no loader, no repacking.

vLLM's own loader says once where everything goes; its copies are noted and from then on done all at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Copies = tuple[list[Tensor], list[Tensor]]  # where to, where from

# What vLLM runs with the very parameters that it loads. Others (experts, quantised or latent attention) derive more
# from them.
PLAIN_METHODS = {"NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
PLAIN_PROCESSED = {"Attention"}


class _Noting(TorchDispatchMode):
    """Notes copies instead of doing them."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: Copies = ([], [])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            for noted, tensor in zip(self.copies, args, strict=False):
                noted.append(tensor)
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def unpacked_linear_layers() -> Iterator[None]:
    """Inside, vLLM on a CPU keeps float32 layers' weights as they are, where it would pack them out of our reach.

    Stored with the inputs as rows, they multiply about as fast as packed ones in small models (256 × 1536: 13 % faster
    to 9 % slower), and up to 24 % slower at 1024 × 2048 and 64 rows; a head is slower still. bfloat16 would lose more:
    it stays packed, and is reloaded.
    """
    from vllm.model_executor.layers import utils

    packed = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.dtype != torch.float32 or weight.ndim != 2 or weight.is_meta:
            packed(layer, remove_weight)
            return
        if remove_weight:  # not an embedding, whose rows are read one by one
            weight.data = weight.data.t().contiguous().t()
        layer.cpu_linear = nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = dispatch
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = packed


@torch.no_grad()
def find_copies(engine_model: Any, weights: Mapping[str, Tensor]) -> Copies | None:
    """The copies that bring `weights` into the engine; None where the engine needs more than copies."""
    for module in engine_model.modules():
        method = type(getattr(module, "quant_method", None)).__name__
        processed = hasattr(module, "process_weights_after_loading") and type(module).__name__ not in PLAIN_PROCESSED
        if method not in PLAIN_METHODS or processed:
            return None
    with _Noting() as noting:
        try:
            engine_model.load_weights(iter(weights.items()))
        except (AssertionError, AttributeError, KeyError, RuntimeError, ValueError):  # parameters were replaced
            return None
    targets, sources = noting.copies
    ours = {_storage(tensor) for tensor in weights.values()}
    theirs = {_storage(parameter) for parameter in engine_model.parameters()}
    if {_storage(source) for source in sources} <= ours and {_storage(target) for target in targets} == theirs:
        return noting.copies
    return None


@torch.no_grad()
def are_done(copies: Copies) -> bool:
    """Whether the copies would change nothing: so it must be in an engine that has just loaded the same model."""
    return all(
        target.shape == source.shape and torch.equal(target, source.to(target))
        for target, source in zip(*copies, strict=True)
    )


@torch.no_grad()
def do(copies: Copies) -> None:
    torch._foreach_copy_(*copies)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
