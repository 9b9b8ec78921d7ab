"""A GPU that cannot be had here, pretended on a CPU: real numbers, real gradients, and what a GPU would mind.

A tensor of the pretended device is one in the CPU's memory whose class says that it is elsewhere. Each operation on one
is seen: if another argument is on the CPU, CUDA would refuse it (a mismatch, raised and recorded), and if its result or
the size of its result has to be known to the host, the host would wait for all work in the queue (a wait, recorded).

    with pretend_gpu() as gpu:
        session = load_session(run)
        gpu.waits.clear()
        update(session, batch, state)
    assert not gpu.mismatches and len(gpu.waits) <= 4, gpu.waits
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState, PartialState
from torch import Tensor, nn
from torch._C import DispatchKey
from torch.nn.attention.flex_attention import create_block_mask
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AutoModelForCausalLM

from grpo_core.model import fused_logprobs, packed_attention
from tests.plain_kernels import plain_flex, plain_gradient, plain_product, plain_statistics, plain_varlen
from tests.pretend_graph import Graphs

CUDA = torch.device("cuda", 0)
ROOT = Path(__file__).parents[1]
# Their result, or its size, is known to the host only when the device has come so far.
WAITING = {
    *("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "bincount"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
}
WIDENING = torch.ops.aten.mm.dtype
# What CUDA refuses while torch.use_deterministic_algorithms is on, by torch's documentation. It names floating-point
# cumsum too, which has raised nothing and repeated on a GPU with torch 2.11.
NOT_REPEATED: dict[str, Callable[..., bool]] = {
    "histc": lambda tensor, *_, **__: tensor.is_floating_point(),
    "bincount": lambda _, weights=None, *__, **___: weights is not None,
    "median": lambda _, *dim, **keys: bool(dim or keys),
    "put": lambda *_, **__: True,
    "scatter_reduce": lambda *given, **_: given[4] == "prod",
    **dict.fromkeys(("kthvalue", "nll_loss_forward", "nll_loss2d_forward", "_ctc_loss"), lambda *_, **__: True),
}
JOINING = {"cat", "stack"}  # do not take a number of the CPU's beside tensors of the device
active: Gpu | None = None


def _widening(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """WIDENING, which a CPU does not have."""
    return a.to(dtype) @ b.to(dtype)


_widening._schema = WIDENING._schema  # type: ignore[attr-defined]


class DeviceTensor(Tensor):
    """A tensor that says it is on the pretended device, in the CPU's memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    # `.data = …` may have put a tensor of the CPU in place of this one.
    device = property(lambda self: CUDA if is_on_gpu(self) else torch.device("cpu"))  # type: ignore[assignment]
    is_cuda = property(lambda self: is_on_gpu(self))  # type: ignore[assignment]
    is_cpu = property(lambda self: not is_on_gpu(self))  # type: ignore[assignment]

    def get_device(self) -> int:
        return 0 if is_on_gpu(self) else -1

    def __repr__(self, **_: Any) -> str:
        return f"{to_cpu(self)!r} on {self.device}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert active is not None, "a tensor of the pretended device outlives it"
        active.check(func, args, kwargs)
        with no_dispatch():
            func = _widening if func is WIDENING else func
            result = func(*args, **kwargs)
        active.graphs.ran(func, args, kwargs, result)
        return tree_map_only(Tensor, to_gpu, result)


def is_on_gpu(value: Any) -> bool:
    return isinstance(value, Tensor) and torch._C._dispatch_keys(value).has(DispatchKey.Python)


def to_gpu(tensor: Tensor) -> Tensor:
    return tensor if is_on_gpu(tensor) else Tensor._make_subclass(DeviceTensor, tensor)


def to_cpu(tensor: Tensor) -> Tensor:
    with no_dispatch():
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


class _Transfer(torch.autograd.Function):
    """From one side to the other; the gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: bool) -> Tensor:
        ctx.there = there
        with no_dispatch():
            copy = tensor.detach().clone()
        return to_gpu(copy) if there else to_cpu(copy)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _Transfer.apply(gradient, not ctx.there), None


class Gpu(TorchFunctionMode):
    """The record, and what happens between the sides before any operation is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.mismatches: list[str] = []
        self.waits: list[str] = []
        self.graphs = Graphs()
        self.pinned: dict[int, Tensor] = {}  # by address; held, so that no other tensor gets it

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("to", "cpu", "cuda") and args and isinstance(args[0], Tensor):
            return self._move(func, name, *args, **kwargs)
        if name == "pin_memory":
            return self._pin(args[0].clone())
        if name == "is_pinned":
            return args[0].untyped_storage().data_ptr() in self.pinned
        if name in ("tolist", "numpy") and is_on_gpu(args[0]):
            if name == "numpy":
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            self._wait(name)
            return func(to_cpu(args[0]))
        if name == "pad_sequence" and any(map(is_on_gpu, args[0])):  # asks for memory of the device it has in C++
            with no_dispatch():
                return to_gpu(func(*args, **kwargs))
        pin = kwargs.pop("pin_memory", False)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            if name in ("tensor", "as_tensor"):
                self._wait(name)
            requires_grad = kwargs.pop("requires_grad", False)
            made = to_gpu(func(*args, **{**kwargs, "device": "cpu"}))
            self.graphs.made(made)
            return made.requires_grad_() if requires_grad else made
        made = func(*args, **kwargs)
        if kwargs.get("device") is not None and is_on_gpu(made):  # like a tensor of the device, made elsewhere
            made = to_cpu(made)
        return self._pin(made) if pin else made

    def check(self, func: Any, args: Any, kwargs: Any) -> None:
        """Record what CUDA would do at this operation besides computing it. Raises RuntimeError where CUDA does."""
        name = func.overloadpacket.__name__.rstrip("_")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if torch.are_deterministic_algorithms_enabled() and NOT_REPEATED.get(name, _repeated)(*args, **kwargs):
            raise RuntimeError(f"{name} does not have a deterministic implementation")
        if name in WAITING:
            self._wait(name)
        elif name in ("index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"):
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype in (torch.bool, torch.uint8) and is_on_gpu(index) for index in indices):
                number = name == "index_put" and args[2].numel() == 1 and not is_on_gpu(args[2])
                if not number:  # else it is masked_fill
                    self._wait(f"{name} with a mask")
            if is_on_gpu(args[0]) and not all(is_on_gpu(index) for index in indices):
                self._wait(f"{name} with an index on the CPU")
                tensors = [args[0], *args[2:3]]  # CUDA moves the index by itself
        elif name == "repeat_interleave" and kwargs.get("output_size") is None:
            self._wait(name)
        elif name in ("copy", "_foreach_copy"):
            pairs = [args[:2]] if name == "copy" else [*zip(*args[:2], strict=True)]
            blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            for to, source in pairs:
                if is_on_gpu(to) != is_on_gpu(source) and (blocking or not self._is_pinned(to, source)):
                    self._wait(f"{name} between the devices")
            return
        of_cpu = [t for t in tensors if not is_on_gpu(t) and (t.ndim > 0 or name in JOINING)]
        if of_cpu and any(map(is_on_gpu, tensors)):
            self.mismatches.append(f"{name} at {_place()}")
            raise RuntimeError(f"Expected all tensors to be on the same device: {self.mismatches[-1]}")

    def _move(self, func: Any, name: str, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if name != "to":
            kwargs = {**dict(zip(("device", "non_blocking"), args, strict=False)), **kwargs, "device": name}
            args = ()
        other = kwargs.pop("other", None) if args == () else args[0]
        if isinstance(other, Tensor):
            args, kwargs = (other.device, other.dtype, *args[1:]), kwargs
        copy = kwargs.pop("copy", False)
        device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        there = is_on_gpu(tensor) if device is None else device.type == "cuda"
        if there != is_on_gpu(tensor):
            if not (non_blocking and (not there or self._is_pinned(tensor))):
                self._wait(f"{name} {'the device' if there else 'the CPU'}")
            tensor = _Transfer.apply(tensor, there)
        return Tensor.to(tensor, dtype=dtype or tensor.dtype, copy=copy, memory_format=memory_format)

    def _is_pinned(self, *tensors: Tensor) -> bool:
        return all(is_on_gpu(t) or t.untyped_storage().data_ptr() in self.pinned for t in tensors)

    def _pin(self, tensor: Tensor) -> Tensor:
        self.pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def _wait(self, name: str) -> None:
        self.graphs.wait(name)
        self.waits.append(f"{name} at {_place()}")


def _repeated(*_: Any, **__: Any) -> bool:
    return False


def _place() -> str:
    """The innermost line of the project outside of this file, as `file:line`."""
    for frame, line in traceback.walk_stack(None):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts and path != Path(__file__):
            return f"{path.relative_to(ROOT)}:{line}"
    return "a library"


def _move_module(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """`nn.Module.to` for the pretended device: parameters that are tied stay so."""
    moved: dict[int, Any] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                new = nn.Parameter(parameter.detach().to(*args, **kwargs), parameter.requires_grad)
                part._parameters[name] = moved.setdefault(id(parameter), new)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(*args, **kwargs)
    return module


def _group_by_device(*arguments: Any) -> dict[Any, Any]:
    """As torch's, which asks each tensor for its device in C++."""
    groups = _GROUP(*arguments)
    return {
        (CUDA if is_on_gpu(lists[0][0]) else where, dtype): (lists, n) for (where, dtype), (lists, n) in groups.items()
    }


_GROUP = torch._C._group_tensors_by_device_and_dtype


def plain_block_mask(compiled: bool) -> Any:
    """A block mask by many operations, whose waits a compiled one does not have."""

    def create(*arguments: Any, **options: Any) -> Any:
        assert active is not None
        before = len(active.waits)
        mask = create_block_mask(*arguments, **options)
        del active.waits[before:]
        return mask

    return create


def _load_and_move(path: Any, *, device_map: Any = None, **options: Any) -> Any:
    """transformers' loader, which fills a device's memory from threads of its own."""
    model = _LOAD(path, **options)
    return model if device_map is None else model.to(device_map[""])


_LOAD = AutoModelForCausalLM.from_pretrained


@contextmanager
def pretend_gpu() -> Iterator[Gpu]:
    """Inside, accelerate trains on the pretended device, and tensors may be made there and moved there and back.

    What cannot exist here is plain torch: flash attention's kernel, Triton's. CUDA graphs are emulated.
    """
    global active
    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier test's may be on the CPU
    with ExitStack() as patches:
        active = patches.enter_context(Gpu())
        for owner, changes in (
            (PartialState, {"default_device": CUDA}),
            (torch.cuda, {"get_device_capability": lambda *_: (9, 0)}),  # an H100's
            (torch._C, {"_group_tensors_by_device_and_dtype": _group_by_device}),
            (nn.Module, {"to": _move_module}),
            (AutoModelForCausalLM, {"from_pretrained": _load_and_move}),
            (packed_attention, {"varlen_attn": plain_varlen, "_flex": plain_flex}),
            (packed_attention, {"_create_block_mask": plain_block_mask}),
            (fused_logprobs, {"_statistics": plain_statistics, "_compute_gradient": plain_gradient}),
            (fused_logprobs, {"_add_product": plain_product}),
            (torch.cuda, active.graphs.patches()),
        ):
            patches.enter_context(mock.patch.multiple(owner, **changes))
        try:
            yield active
        finally:
            active = None
            AcceleratorState._reset_state(reset_partial_state=True)
