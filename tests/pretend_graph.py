"""CUDA graphs of the pretended GPU: a capture records its operations, a replay runs them again into the
same memory. As on a GPU, what the host would wait for ends a capture, and raises in the debug mode for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves


class Graphs:
    """What is captured, and how often something was; `broken`: captures that failed, after which torch's allocator
    gives no memory back; `begun`: called when a capture has begun, before its block."""

    def __init__(self) -> None:
        self.captures, self.broken = 0, 0
        self.mode: int | str = 0  # of torch.cuda.set_sync_debug_mode
        self.capturing: Graph | None = None
        self.begun: Callable[[], None] = lambda: None

    def wait(self, name: str) -> None:
        """Warn of it, if that is asked for. Raises RuntimeError where the host may not wait."""
        if self.mode in (1, "warn"):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=4)
        if self.mode in (2, "error"):
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.capturing:
            self.broken += 1
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({name})")

    def made(self, tensor: Tensor) -> None:
        """Record a tensor that was made without any of the device."""
        if self.capturing:
            with no_dispatch():
                value = tensor.clone()
            self._record(lambda: tensor.copy_(value))

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if not self.capturing:
            return
        memory = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if func._schema.is_mutable:
            self._record(lambda: func(*args, **kwargs))
        elif any(_address(output) not in memory for output in outputs):  # else it is a view

            def again() -> None:
                for output, value in zip(outputs, tree_leaves(func(*args, **kwargs)), strict=True):
                    output.copy_(value)

            self._record(again)

    def _record(self, work: Callable[[], object]) -> None:
        assert self.capturing
        self.capturing.work.append(work)

    def patches(self) -> dict[str, Any]:
        """What is put in place of torch.cuda's."""
        return {
            "CUDAGraph": Graph,
            "graph": lambda graph, **_: _Capture(self, graph),
            "is_current_stream_capturing": lambda: self.capturing is not None,
            "set_sync_debug_mode": lambda mode: setattr(self, "mode", mode),
            "get_sync_debug_mode": lambda: self.mode,
        }


def _address(tensor: Tensor) -> int:
    with no_dispatch():
        return tensor.untyped_storage().data_ptr()


class Graph:
    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []

    def replay(self) -> None:
        with no_dispatch():
            for work in self.work:
                work()


class _Capture(AbstractContextManager[None]):
    def __init__(self, graphs: Graphs, graph: Graph):
        self.graphs, self.graph = graphs, graph

    def __enter__(self) -> None:
        self.graphs.captures += 1
        self.graphs.capturing = self.graph
        self.graphs.begun()

    def __exit__(self, *_: object) -> None:
        self.graphs.capturing = None
