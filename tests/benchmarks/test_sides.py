"""What both sides of the comparison with TRL need, on a machine with little more than PyTorch."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

from benchmarks.command import ROOT

NEEDED = {"datasets", "numpy", "pyarrow", "torch", "transformers", "trl"}
DRAWS = {"matplotlib"}  # after a case is measured, where results are written


def imported(module: str) -> Iterator[str]:
    """Modules that a module of benchmarks imports, at its top or within functions."""
    for node in ast.walk(ast.parse((ROOT / "benchmarks" / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_the_comparison_needs_no_package_that_comes_without_pytorch_and_trl() -> None:
    found, left = set[str](), ["vs_trl", "side_ours", "side_trl"]
    seen = set(left)
    while left:
        names = {*imported(left.pop())}
        found |= names
        more = {name.partition(".")[2] for name in names if name.startswith("benchmarks.")} - seen
        seen |= more
        left += more
    assert "workload" in seen
    outside = {name.partition(".")[0] for name in found} - {"benchmarks", "grpo_core", "tasks"}
    assert outside - sys.stdlib_module_names == NEEDED | DRAWS
