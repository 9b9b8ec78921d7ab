"""Driver of the pretended GPU, under torch's own functions in Python: torch itself chooses the device of a function and
the generator of random numbers, and refuses what it refuses. Also: which operations make the host wait, or refuse
tensors of the CPU, and copies between the host and the device that are made later."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

H100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * 2**30)
# Their result, or its size, is known to the host only when the device has come so far.
WAITING = {
    *("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "bincount"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
}
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot"}  # of floating point alone
# Do not take a number of the CPU's beside tensors of the device.
STRICT = {
    *("cat", "stack", "index_select", "index_copy", "index_add", "gather", "scatter", "embedding"),
    *("searchsorted", "bucketize", "_fused_adamw", *PRODUCTS),
}
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


def is_not_repeated(name: str, *args: Any, **kwargs: Any) -> bool:
    return name in NOT_REPEATED and NOT_REPEATED[name](*args, **kwargs)


class Driver:
    """`count` GPUs, as one process sees them. Each thread has a current one: GPU 0 until it chooses another.

    `wait` is called where the host waits, and `reach` with the device that work is for. Streams keep no order here: all
    work is done when it is asked for.
    """

    def __init__(self, count: int, wait: Callable[[str], None], reach: Callable[[torch.device, str], None]):
        self.count, self.wait, self.reach = count, wait, reach
        self.generators = tuple(torch.Generator() for _ in range(count))
        self.thread = threading.local()

    @property
    def current(self) -> int:
        return getattr(self.thread, "current", 0)

    @property
    def is_chosen(self) -> bool:
        """True if this thread has said which GPU it works on."""
        return hasattr(self.thread, "chosen")

    def index(self, device: torch.device) -> int:
        """Number of the GPU that a device names. Raises RuntimeError if there is none."""
        index = self.current if device.index is None else device.index
        if not 0 <= index < self.count:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return index

    @contextmanager
    def drawing(self, *arguments: Any) -> Iterator[None]:
        """Inside, random numbers are the current GPU's, whose generator is not the CPU's. Raises RuntimeError if there
        is a generator among the arguments: it is the CPU's."""
        if any(isinstance(it, torch.Generator) for it in arguments):
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        own, before = self.generators[self.current], torch.get_rng_state()
        torch.set_rng_state(own.get_state())
        try:
            yield
        finally:
            own.set_state(torch.get_rng_state())
            torch.set_rng_state(before)

    def patches(self) -> list[tuple[Any, dict[str, Any]]]:
        """What stands in for a driver, by the module that has it in a build of torch for CUDA."""
        return [
            (
                torch._C,
                {
                    "_cuda_getDeviceCount": lambda: self.count,
                    "_cuda_getDevice": lambda: self.current,
                    "_cuda_setDevice": self._choose,
                    "_cuda_synchronize": lambda: self.wait("synchronize"),
                    "_cuda_emptyCache": lambda: None,
                    "_cuda_memoryStats": lambda index: {},
                    "_cuda_resetPeakMemoryStats": lambda index: None,
                },
            ),
            (
                torch.cuda,
                {
                    "_initialized": True,
                    "_is_in_bad_fork": lambda: False,  # a build for CUDA counts GPUs before processes are forked
                    "_cached_device_count": None,
                    "_cudart": SimpleNamespace(cudaMemGetInfo=lambda index: (H100.total_memory, H100.total_memory)),
                    "_exchange_device": self._exchange,
                    "_maybe_exchange_device": self._exchange,
                    "_get_device_properties": lambda index: H100,
                    "default_generators": self.generators,
                    "Stream": mock.Mock,
                    "Event": mock.Mock,
                    "current_stream": self._current_stream,
                    "stream": lambda _: nullcontext(),
                },
            ),
        ]

    def _current_stream(self, device: Any = None) -> Any:
        self.reach(torch.device("cuda" if device is None else device), "current_stream")
        return mock.Mock()

    def _choose(self, index: int) -> None:
        self.thread.current, self.thread.chosen = self.index(torch.device("cuda", index)), True

    def _exchange(self, index: int) -> int:
        if index < 0:
            return -1
        before, self.thread.current = self.current, self.index(torch.device("cuda", index))
        return before


class Copies:
    """Copies between page-locked memory and the device, which are made when the host next waits."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self.reads: list[tuple[Tensor, Tensor, str]] = []  # where from, what is expected there, who asked
        self.writes: list[tuple[Tensor, Tensor]] = []  # where to, what

    def read_later(self, host: Tensor, place: str) -> None:
        self.reads.append((host.detach(), host.detach().clone(), place))

    def write_later(self, host: Tensor) -> None:
        """Take away what is there already, and leave garbage."""
        host = host.detach()
        self.writes.append((host, host.clone()))
        garbage = ~(host if host.dtype == torch.bool else _bytes(host))
        host.copy_(garbage.view(host.dtype).view(host.shape))

    def finish(self) -> None:
        for host, expected, place in self.reads:
            if not _bytes(host).equal(_bytes(expected)):
                self.races.append(f"memory was written before its copy to the device was made, at {place}")
        for host, values in self.writes:
            host.copy_(values)
        self.reads, self.writes = [], []


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
