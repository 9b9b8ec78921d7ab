"""Finds the modules of your own rewards: installed, in the working folder, or beside the configuration.

A run keeps copies of them in the folder KEPT beside its configuration; its stages read these copies.
"""

from __future__ import annotations

import importlib.machinery
import symtable
import sys
import sysconfig
from importlib.abc import InspectLoader
from pathlib import Path

from grpo_core.errors import RewardError


def searched() -> str:
    """The searched folders other than those of Python and its packages, as part of a sentence."""
    pythons = (Path(sys.prefix), Path(sysconfig.get_path("stdlib")))
    folders = (Path(entry or ".").resolve() for entry in sys.path)
    own = [it for it in folders if it.is_dir() and not any(it.is_relative_to(folder) for folder in pythons)]
    return ", ".join(str(folder) for folder in dict.fromkeys(own))


def place_of(file: Path, function: str) -> str:
    """Path that a file of a reward must have inside a folder to be imported from it: my_rewards.py, house/tone.py."""
    module = function.partition(":")[0].replace(".", "/")
    for place in (f"{module}{file.suffix}", f"{module}/{file.name}"):
        if file.as_posix().endswith(f"/{place}"):
            return place
    folders = [folder for folder in sys.path if folder and file.is_relative_to(folder)]  # of another module
    return file.relative_to(max(folders, key=len)).as_posix() if folders else file.name


def missing(function: str, module: str) -> RewardError:
    """The error for a module that is in none of the folders."""
    file = f"{module.replace('.', '/')}.py"
    return RewardError(
        f"reward {function!r} cannot be imported: there is no module {module!r}; put {file} into the working folder or "
        f"beside the configuration, or add its folder to PYTHONPATH (searched: the installed packages, {searched()})"
    )


def not_defined(function: str, file: str | None) -> RewardError:
    module, _, name = function.partition(":")
    return RewardError(f"reward {function!r} cannot be imported: {file or module} does not define {name!r}")


def check_source(function: str) -> None:
    """Raises RewardError if the module of `module:function` is missing, is not Python or does not define the function.

    The module is not run, since its imports may take seconds; mistakes that only running it would show pass.
    """
    module, _, name = function.partition(":")
    spec = _spec(module)
    if spec is None:
        raise missing(function, module)
    source = spec.loader.get_source(module) if isinstance(spec.loader, InspectLoader) else None
    if source is None:  # compiled
        return
    try:
        top = symtable.symtable(source, str(spec.origin), "exec")
    except SyntaxError as error:
        raise RewardError(f"reward {function!r} cannot be imported: SyntaxError: {error}") from None
    bound = {it.get_name() for it in top.get_symbols() if it.is_assigned() or it.is_imported() or it.is_namespace()}
    defines_more = "__getattr__" in bound or "import *" in source or "globals()" in source
    if name not in bound and not defines_more:
        raise not_defined(function, spec.origin)


def _spec(module: str) -> importlib.machinery.ModuleSpec | None:
    """The module's spec as the import system finds it, without importing its packages as `find_spec` would."""
    spec, folders = None, None
    parts = module.split(".")
    if "" in parts:
        return None
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, folders, None) for finder in finders)), None)
        if spec is None:
            return None
        folders = spec.submodule_search_locations
        if folders is None and depth < len(parts):
            return None
    return spec
