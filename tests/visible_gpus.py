"""What torch says in a process that uses one of several GPUs, where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch


@contextmanager
def using_gpu(own: int, count: int) -> Iterator[None]:
    """Inside, this process has used CUDA, sees `count` GPUs, and its current one is number `own`."""
    says = {"is_initialized": lambda: True, "current_device": lambda: own, "device_count": lambda: count}
    with mock.patch.multiple(torch.cuda, **says):
        yield
