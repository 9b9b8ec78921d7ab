"""Import the modules that a configuration names from the folders beside it, and what these modules import from there.

On `sys.path`, such a folder would lend its files to every library: a trio.py in it would run where a library looks for
the package trio.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType
from typing import Any

BESIDE = "GRPO_BESIDE"  # environment variable: the folders and names, for the processes that this one starts


class _Finder(MetaPathFinder):
    """Finds modules of these names in these folders, and what modules found here import from there."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.folders: list[str] = []
        self.names: set[str] = set()
        self.found: set[str] = set()
        self.is_inherited = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if path is not None:  # inside a package, whose own folder is searched
            return None
        if fullname not in self.names and _importer(sys._getframe(1)) not in self.found:
            return None
        if spec := PathFinder.find_spec(fullname, self.folders):
            self.found.add(fullname)
            self.add([], [fullname])
        return spec

    def add(self, folders: Iterable[str], modules: Iterable[str]) -> None:
        self.folders += [folder for folder in dict.fromkeys(folders) if folder not in self.folders]
        self.names |= {module.partition(".")[0] for module in modules}
        os.environ[BESIDE] = json.dumps([self.folders, sorted(self.names)])
        if self not in sys.meta_path:
            sys.meta_path.append(self)  # behind the others: a file hides no installed module


FINDER = _Finder()


def search(folders: Iterable[str], modules: Iterable[str]) -> None:
    """From now on, find these modules in these folders, here and in the processes that this one starts. What this
    process has inherited is forgotten: that was for another configuration."""
    if FINDER.is_inherited:
        FINDER.forget()
    FINDER.add(folders, modules)


def inherit() -> None:
    """Find what the process that has started this one finds."""
    if given := os.environ.get(BESIDE):
        FINDER.add(*json.loads(given))
        FINDER.is_inherited = True


def _importer(frame: FrameType | None) -> str:
    """The outermost package of the module whose code imports."""
    while frame and frame.f_globals.get("__name__", "").startswith(("importlib", "_frozen_importlib")):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "").partition(".")[0] if frame else ""
