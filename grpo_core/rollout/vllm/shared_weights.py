"""The trainer's weights and a vLLM engine's of the same process: the same memory, or one pass of copies.

vLLM's own loader says once where everything goes: its copies are noted. Where each brings a whole parameter to one
piece of the engine's memory, the parameter moves there for good and nothing is left to hand over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_core.rollout.checksums import bit_sums, differences, read

Copies = tuple[list[Tensor], list[Tensor]]  # where to, where from

# Layers that vLLM runs with the very parameters that it loads. Others (experts, quantised or latent attention) derive
# more from them.
PLAIN_METHODS = {"NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
PLAIN_PROCESSED = {"Attention"}


class _Noting(TorchDispatchMode):
    """Notes copies instead of making them."""

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

    On one thread they multiply 1.1 times (256 × 256) to 1.2 times (256 × 1536) as long as packed ones at 64 rows, 1.3
    times at 1024 × 2048. bfloat16 would lose more: it stays packed, and is reloaded.
    """
    from vllm.model_executor.layers import utils

    packed = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.dtype != torch.float32 or weight.ndim != 2 or weight.is_meta:
            packed(layer, remove_weight)
            return
        layer.cpu_linear = nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = dispatch
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = packed


def repack_experts() -> None:
    """Make vLLM pack a mixture's experts after each reload, from now on in this process. vLLM 0.32 does so after the
    first loading only, and its kernel for CPUs would then read plain weights as packed ones. Does nothing on a GPU,
    whose kernels read plain weights."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform

    method: Any = UnquantizedFusedMoEMethod
    set_up = method._setup_kernel
    if not current_platform.is_cpu() or hasattr(set_up, "repacks"):
        return

    def set_up_and_pack(self: Any, layer: Any, w13: Tensor, w2: Tensor) -> None:
        reloaded = self.moe_kernel is not None
        set_up(self, layer, w13, w2)
        if reloaded:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    set_up_and_pack.repacks = True  # type: ignore[attr-defined]
    method._setup_kernel = set_up_and_pack


@torch.no_grad()
def find_copies(engine_model: Any, weights: Mapping[str, Tensor]) -> Copies | None:
    """Return the copies that bring `weights` into the engine; None if the engine needs more than copies."""
    for module in engine_model.modules():
        method = type(getattr(module, "quant_method", None)).__name__
        processed = hasattr(module, "process_weights_after_loading") and type(module).__name__ not in PLAIN_PROCESSED
        if method not in PLAIN_METHODS or processed:
            return None
    with _Noting() as noting:
        try:
            type(engine_model).load_weights(engine_model, iter(weights.items()))  # without what notes it
        except (AssertionError, AttributeError, KeyError, RuntimeError, ValueError):  # parameters were replaced
            return None
    targets, sources = noting.copies
    ours = {_storage(tensor) for tensor in weights.values()}
    theirs = {_storage(parameter) for parameter in engine_model.parameters()}
    if {_storage(source) for source in sources} <= ours and {_storage(target) for target in targets} == theirs:
        return noting.copies
    return None


@torch.no_grad()
def copies_change_nothing(copies: Copies) -> bool:
    """True if the copies would change nothing, as in an engine that has just loaded the same model."""
    return all(
        target.shape == source.shape and torch.equal(target, source.to(target))
        for target, source in zip(*copies, strict=True)
    )


@torch.no_grad()
def share_memory(copies: Copies, owned: Iterable[nn.Parameter]) -> bool:
    """Move the trainer's parameters to where the copies bring them. False, and none moved, if one of them cannot be.

    From then on the engine has each change as it is made. It must already have the same weights: see
    `copies_change_nothing`.
    """
    parameters = {parameter.data_ptr(): parameter for parameter in owned}
    places = {source.data_ptr(): (source, target) for target, source in zip(*copies, strict=True)}
    if parameters.keys() != places.keys() or len(places) != len(copies[0]):
        return False
    for place, parameter in parameters.items():
        source, target = places[place]
        alike = (source.shape, source.dtype, source.device) == (target.shape, target.dtype, target.device)
        if not (alike and parameter.shape == target.shape and target.is_contiguous()):
            return False
    for place, parameter in parameters.items():
        parameter.data = places[place][1]
    return True


@torch.no_grad()
def unshare_memory(model: nn.Module) -> None:
    """Give a model that shares its memory with an engine its own memory."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


@torch.no_grad()
def run_copies(copies: Copies) -> None:
    torch._foreach_copy_(*copies)


def lost_copies(copies: Copies, weights: Mapping[str, Tensor]) -> list[str]:
    """Return a phrase for each of the copies of `weights` whose target does not hold what its source does."""
    names = {_storage(tensor): name for name, tensor in weights.items()}
    # One of them may bring a part of a weight only.
    numbered = [f"copy {n} of {names[_storage(source)]}" for n, source in enumerate(copies[1])]
    sent = [bit_sums(source.to(target.dtype)) for target, source in zip(*copies, strict=True)]
    received = map(bit_sums, copies[0])
    return differences(*read(*(dict(zip(numbered, found, strict=True)) for found in (sent, received))))


def have_same_memory(engine_model: nn.Module, weights: Mapping[str, Tensor]) -> bool:
    """True if each parameter of the engine lies in the memory of these weights."""
    return {_storage(parameter) for parameter in engine_model.parameters()} <= {*map(_storage, weights.values())}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
