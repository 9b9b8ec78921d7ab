"""A GPU that cannot be had here, pretended on a CPU: real numbers, real gradients, and what a GPU would mind.

A tensor of the pretended device is one in the CPU's memory whose class says that it is elsewhere. Each operation on one
is seen: if another argument is on the CPU, CUDA would refuse it (a mismatch, raised and recorded), and if its result or
the size of its result has to be known to the host, the host would wait for all work in the queue (a wait, recorded).
Copies that the host does not wait for are made when it next waits: what is read before is garbage, and page-locked
memory that is written before is recorded (a race). Work that would go to another process's GPU is recorded (a stray).

    with pretend_gpu() as gpu:
        session = load_session(run)
        gpu.waits.clear()
        update(session, batch, state)
    assert not gpu.mismatches and len(gpu.waits) <= 4, gpu.waits
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch._C import DispatchKey
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from transformers import AutoModelForCausalLM

from grpo_core.model import fused_logprobs, packed_attention
from tests.plain_kernels import plain_flex, plain_gradient, plain_product, plain_statistics, plain_varlen
from tests.pretend_cuda import PRODUCTS, STRICT, WAITING, Copies, Driver, is_not_repeated
from tests.pretend_graph import Graphs

if find_spec("bitsandbytes"):
    import bitsandbytes  # noqa: F401  # before there seems to be a GPU, for which it has no kernels here

ROOT = Path(__file__).parents[1]
WIDENING = torch.ops.aten.mm.dtype
active: Gpu | None = None


def _widening(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """WIDENING, which a CPU does not have."""
    return a.to(dtype) @ b.to(dtype)


_widening._schema = WIDENING._schema  # type: ignore[attr-defined]


class DeviceTensor(Tensor):
    """A tensor that says it is on the pretended device, in the CPU's memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    # `.data = …` may have put a tensor of the CPU in place of this one.
    device = property(lambda self: own_device() if is_on_gpu(self) else torch.device("cpu"))  # type: ignore[assignment]
    is_cuda = property(lambda self: is_on_gpu(self))  # type: ignore[assignment]
    is_cpu = property(lambda self: not is_on_gpu(self))  # type: ignore[assignment]

    def get_device(self) -> int:
        return own_device().index if is_on_gpu(self) else -1

    def __repr__(self, **_: Any) -> str:
        return f"{to_cpu(self)!r} on {self.device}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return to_cpu(self).__reduce_ex__(protocol)  # torch.save writes what the device has

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert active is not None, "a tensor of the pretended device outlives it"
        later = active.check(func, args, kwargs)
        if kwargs.get("device") is not None:  # in a sharded tensor's operation; or the CPU, which is what C++ sees
            kwargs = {**kwargs, "device": torch.device("cpu")}
        draws = torch.Tag.nondeterministic_seeded in func.tags
        with no_dispatch(), active.driver.drawing(*args, *kwargs.values()) if draws else nullcontext():
            func = _widening if func is WIDENING else func
            result = func(*args, **kwargs)
        for host in later:
            active.copies.write_later(host)
        active.graphs.ran(func, args, kwargs, result)
        return _all_to_gpu(result)


def own_device() -> torch.device:
    """The device of this process's tensors, which has an index, whatever they were asked to be on."""
    assert active is not None, "a tensor of the pretended device outlives it"
    return active.device


def is_on_gpu(value: Any) -> bool:
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return False
    return torch._C._dispatch_keys(value).has(DispatchKey.Python)


def to_gpu(tensor: Tensor) -> Tensor:
    return tensor if is_on_gpu(tensor) else Tensor._make_subclass(DeviceTensor, tensor)


def own_part(tensor: Any) -> Any:
    """The tensor, or this process's part of a sharded one."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def with_part(tensor: Tensor, part: Tensor) -> Tensor:
    """What has this part in place of its own."""
    return DTensor(part, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else part


def _all_to_gpu(result: Any) -> Any:
    if isinstance(result, list | tuple):
        return type(result)(map(_all_to_gpu, result))
    if isinstance(result, AsyncCollectiveTensor):
        result = result.wait()
    return to_gpu(result) if isinstance(result, Tensor) else result


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among an operation's arguments, and in the lists among them; torch's pytree takes longer."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


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

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        self.device, self.copies = torch.device("cuda", index), Copies()
        self.driver = Driver(count, self._wait, self.reach)
        self.mismatches: list[str] = []
        self.waits: list[str] = []
        self.graphs = Graphs()
        self.races = self.copies.races
        self.strays: list[str] = []
        self.pinned: dict[int, Tensor] = {}  # by address; held, so that no other tensor gets it
        self.main = threading.get_ident()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("to", "cpu", "cuda") and args and isinstance(args[0], Tensor):
            moved = self._move(func, name, own_part(args[0]), *args[1:], **kwargs)
            if moved is own_part(args[0]):
                return args[0]
            if not isinstance(args[0], DTensor) or is_on_gpu(moved) != is_on_gpu(own_part(args[0])):
                return with_part(args[0], moved)
        if name == "pin_memory":
            if is_on_gpu(args[0]):
                raise RuntimeError("only dense CPU tensors can be pinned")
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
            self.reach(torch.device(kwargs["device"]), name)
            if name in ("tensor", "as_tensor"):
                self._wait(name)
            requires_grad = kwargs.pop("requires_grad", False)
            with self.driver.drawing(*kwargs.values()) if name.startswith("rand") else nullcontext():
                made = to_gpu(func(*args, **{**kwargs, "device": "cpu"}))
            self.graphs.made(made)
            return made.requires_grad_() if requires_grad else made
        made = func(*args, **kwargs)
        of_device = is_on_gpu(own_part(made))
        if kwargs.get("device") is not None and of_device:  # like a tensor of the device, made elsewhere
            made = with_part(made, to_cpu(own_part(made)))
        return self._pin(made) if pin else made

    def check(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """Record what CUDA would do at this operation besides computing it. Returns the host's tensors that are written
        when the host next waits. Raises RuntimeError where CUDA does."""
        name = func.overloadpacket.__name__.rstrip("_")
        tensors = [*_tensors(args), *_tensors(kwargs.values())]
        if torch.are_deterministic_algorithms_enabled() and is_not_repeated(name, *args, **kwargs):
            raise RuntimeError(f"{name} does not have a deterministic implementation")
        if name in PRODUCTS and not tensors[0].is_floating_point():
            raise NotImplementedError(f"{name} is not implemented for {tensors[0].dtype} on CUDA")
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
            later = []
            for to, source in pairs:
                if is_on_gpu(to) != is_on_gpu(source):
                    if blocking or not self._is_pinned(to, source):
                        self._wait(f"{name} between the devices")
                    elif is_on_gpu(to):
                        self.copies.read_later(source, _place())
                    else:
                        later.append(to)
            return later
        of_cpu = [t for t in tensors if not is_on_gpu(t) and (t.ndim > 0 or name in STRICT)]
        if of_cpu and any(map(is_on_gpu, tensors)):
            self.mismatches.append(f"{name} at {_place()}")
            raise RuntimeError(f"Expected all tensors to be on the same device: {self.mismatches[-1]}")
        return []

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
        if there and device is not None:
            self.reach(device, name)
        crosses = there != is_on_gpu(tensor)
        waits = crosses and not (non_blocking and (not there or self._is_pinned(tensor)))
        if waits:
            self._wait(f"{name} {'the device' if there else 'the CPU'}")
        elif crosses and there:
            self.copies.read_later(tensor, _place())
        if crosses:
            tensor = _Transfer.apply(tensor, there)
        moved = Tensor.to(tensor, dtype=dtype or tensor.dtype, copy=copy, memory_format=memory_format)
        if crosses and not there and not waits:
            self.copies.write_later(moved)
        return moved

    def reach(self, device: torch.device, name: str) -> None:
        """Record work for a GPU that is not this process's, or that is only by chance, where a thread has not chosen
        one. Raises RuntimeError if there is no such GPU."""
        by_chance = device.index is None and threading.get_ident() != self.main and not self.driver.is_chosen
        if by_chance or self.driver.index(device) != self.device.index:
            self.strays.append(f"{name} in thread {threading.current_thread().name} at {_place()}")

    def _is_pinned(self, *tensors: Tensor) -> bool:
        return all(is_on_gpu(t) or t.untyped_storage().data_ptr() in self.pinned for t in tensors)

    def _pin(self, tensor: Tensor) -> Tensor:
        part = own_part(tensor)
        self.pinned[part.untyped_storage().data_ptr()] = part
        return tensor

    def _wait(self, name: str) -> None:
        self.graphs.wait(name)
        self.waits.append(f"{name} at {_place()}")
        self.copies.finish()


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
        (own_device() if is_on_gpu(lists[0][0]) else where, dtype): (lists, n)
        for (where, dtype), (lists, n) in groups.items()
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
    model, found = _LOAD(path, **options)
    return model if device_map is None else model.to(device_map[""]), found


_LOAD = AutoModelForCausalLM.from_pretrained


def _within(gpu: Gpu, work: Callable[..., Any]) -> Callable[..., Any]:
    """The work with the pretended device, which a thread does not have by itself, nor a backward pass, whose functions
    and hooks run inside of an operation."""

    def work_within(*arguments: Any, **options: Any) -> Any:
        with gpu:
            return work(*arguments, **options)

    return work_within


def needs_cpu_build() -> None:
    """Skip the test with a PyTorch that is built for CUDA: its C++ asks the driver where nothing stands in for it."""
    if torch.version.cuda:
        pytest.skip("the pretended GPU is for a PyTorch that is built without CUDA")


@contextmanager
def pretend_gpu(index: int = 0, count: int = 1) -> Iterator[Gpu]:
    """Inside, torch sees `count` GPUs, accelerate trains on the pretended device (this process's, number `index`), and
    tensors may be made there and moved there and back, in every thread.

    What cannot exist here is plain torch: flash attention's kernel, Triton's. CUDA graphs are emulated.
    """
    global active
    needs_cpu_build()
    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier test's may be on the CPU
    with ExitStack() as patches:
        active = patches.enter_context(Gpu(index, count))
        for owner, changes in (
            *active.driver.patches(),
            (threading.Thread, {"run": _within(active, threading.Thread.run)}),
            (torch.autograd, {"_engine_run_backward": _within(active, torch.autograd._engine_run_backward)}),
            (torch._C, {"_group_tensors_by_device_and_dtype": _group_by_device}),
            (nn.Module, {"to": _move_module}),
            (
                DTensor,
                {name: property(attrgetter(f"_local_tensor.{name}")) for name in ("device", "is_cuda", "is_cpu")},
            ),
            (AutoModelForCausalLM, {"from_pretrained": _load_and_move}),
            (packed_attention, {"varlen_attn": plain_varlen, "_flex": plain_flex}),
            (packed_attention, {"_create_block_mask": plain_block_mask}),
            (fused_logprobs, {"_statistics": plain_statistics, "_compute_gradient": plain_gradient}),
            (fused_logprobs, {"_add_product": plain_product}),
            (torch.cuda, active.graphs.patches()),
        ):
            patches.enter_context(mock.patch.multiple(owner, create=True, **changes))
        try:
            yield active
            active.copies.finish()
        finally:
            active = None
            AcceleratorState._reset_state(reset_partial_state=True)
