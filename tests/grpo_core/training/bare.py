"""`python -m tests.grpo_core.training.bare`: commands of grpo_core where little beside PyTorch can be imported.

Reads from standard input, as JSON, a list of [packages to allow from here on, arguments of `python -m`]. grpo_core may
import these packages only, and they what they require. Ends with the chain of imports that brought another one.
"""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from traceback import extract_tb
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3] / "grpo_core"
DISTRIBUTIONS = packages_distributions()  # of each module that is not Python's
own: set[str] = set()  # distributions that grpo_core may import
visible: set[str] = set()  # and those that they require
python_import = builtins.__import__


def required(names: Iterable[str]) -> set[str]:
    """These distributions and all that they require, without extras that nobody asks for."""
    found: set[tuple[str, str]] = set()
    waiting = [(canonicalize_name(name), "") for name in names]
    while waiting:
        if (here := waiting.pop()) in found:
            continue
        found.add(here)
        try:
            lines = requires(here[0]) or []
        except PackageNotFoundError:  # of another platform
            continue
        for it in map(Requirement, lines):
            if it.marker is None or it.marker.evaluate({"extra": here[1]}):
                waiting += [(canonicalize_name(it.name), extra) for extra in ("", *it.extras)]
    return {name for name, _ in found}


def is_in(module: str, allowed: set[str]) -> bool:
    top = module.partition(".")[0]
    owners = DISTRIBUTIONS.get(top, [])
    return top == ROOT.name or not owners or any(canonicalize_name(name) in allowed for name in owners)


class Hiding:
    """A finder of modules to which only those of `visible` are there."""

    def __init__(self, finder: Any):
        self.finder = finder

    def find_spec(self, name: str, *arguments: Any) -> Any:
        return self.finder.find_spec(name, *arguments) if is_in(name, visible) else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


def checked_import(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    importer = (globals or {}).get("__name__", "")
    if importer.startswith("grpo_core.") and not level and not is_in(name, own):
        raise ModuleNotFoundError(f"{importer} imports {name}", name=name)
    return python_import(name, globals, locals, fromlist, level)


def main() -> None:
    sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
    builtins.__import__ = checked_import
    for packages, command in json.load(sys.stdin):
        own.update(packages)
        visible.update(required(packages))
        sys.argv = command
        try:
            import_module(command[0]).main()
        except ImportError as error:
            frames = [(Path(frame.filename), frame.lineno) for frame in extract_tb(error.__traceback__)]
            ours = [f"{path.relative_to(ROOT)}:{line}" for path, line in frames if path.is_relative_to(ROOT)]
            sys.exit(f"{' → '.join(ours)}: {error}")
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


if __name__ == "__main__":
    main()
