"""What the parts of `benchmarks.gpu_check` share: rows of the table, sizes, and how to time and compare on a device."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import QWEN, WORD_PROBLEMS
from benchmarks.workload import Workload

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
TINY = not ON_GPU or "GPU_CHECK_TINY" in os.environ  # sizes that only show that a part runs
PRECISION = "bf16" if ON_GPU else "no"
PEAK_FLOPS = 989e12  # FLOP/s of an H100 or H200 in bfloat16, dense, by the data sheet
MISSING = "needs a GPU"


@dataclass(frozen=True)
class Row:
    """One line of the table. `passed`: None for a figure without a demand, or one that could not be measured."""

    what: str
    found: str
    demanded: str = ""
    passed: bool | None = None


Report = Callable[[Row], None]


def append(rows: Path, row: Row) -> None:
    """Append a row to a part's file, so that rows before a crash are kept."""
    with rows.open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def at_most(report: Report, what: str, found: float, bound: float) -> None:
    """Report a figure with an upper bound; NaN is above it."""
    report(Row(what, f"{found:.2e}", f"at most {bound:.1e}", found <= bound))


def equals(report: Report, what: str, found: object, expected: object) -> None:
    """Report a value that has to be the expected one."""
    report(Row(what, str(found), str(expected), found == expected))


def small(**changes: Any) -> Workload:
    """Workload of the parts that tell right from wrong: 40 million parameters, or 100 thousand."""
    sizes: dict[str, Any] = {"hidden": 512, "intermediate": 1536, "layers": 8, "heads": 8, "vocabulary": 16_384}
    sizes |= {"completion": 64}
    if TINY:
        sizes = {"hidden": 64, "intermediate": 128, "layers": 2, "heads": 2, "vocabulary": 512, "prompts": 2}
        sizes |= {"prompt_lengths": (8, 24), "group": 4, "completion": 16}
    sizes |= {"mode": "generate", **changes}
    return Workload(**sizes)


def real(shape: str, **changes: Any) -> Workload:
    """Workload of the parts that measure, in a shape of Qwen2.5: 16 prompts × 8 completions of at most 512 tokens."""
    sizes: dict[str, Any] = {**QWEN[shape], **WORD_PROBLEMS, "prompts": 16, "steps": 8, "warm_up": 2, **changes}
    if TINY:
        sizes |= {"hidden": 64, "intermediate": 128, "layers": 2, "heads": 2, "kv_heads": 2, "vocabulary": 1024}
        sizes |= {"prompts": 2, "group": 4, "prompt_lengths": (5, 14), "completion": 16}
    return Workload(**sizes)


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Norm of the difference, relative to the norm of `expected`."""
    flat = ([part.detach().cpu().flatten().double() for part in parts] for parts in (found, expected))
    ours, plainly = map(torch.cat, flat)
    return ((ours - plainly).norm() / plainly.norm()).item()


def device_seconds(work: Callable[[], object], repeats: int = 10) -> float:
    """Median seconds of a piece of work, by the device's own clock if it has one, after two warm-ups."""
    found = []
    for turn in range(2 + (repeats if ON_GPU else 2)):
        if ON_GPU:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            took = begin.elapsed_time(end) / 1e3
        else:
            start = time.perf_counter()
            work()
            took = time.perf_counter() - start
        if turn >= 2:
            found.append(took)
    return median(found)


def product_flops(size: int = 8192) -> float:
    """FLOP/s of a matrix product in bfloat16 here."""
    size = size if ON_GPU else 256
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / device_seconds(lambda: a @ b)
