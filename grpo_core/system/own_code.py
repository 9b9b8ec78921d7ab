"""Find your own functions (rewards, columns of data): in installed modules, the working folder, or beside the
configuration.

A run keeps copies of their modules in the folder KEPT beside its configuration; its stages read these copies.

Each function takes `what`, the function as a part of a sentence, such as "reward 'mine:graded'", and `fault`, the error
that it raises.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import inspect
import symtable
import sys
import sysconfig
from collections.abc import Callable
from importlib.abc import InspectLoader
from pathlib import Path
from typing import Any

from grpo_core.system.beside import FINDER

Fault = Callable[[str], Exception]

# Packages whose scripts people bring along and that are not installed with this one, and what works without each.
ELSEWHERE = {
    "trl": "trl is not installed here: take the built-in reward for it (docs/explanation/trl.md#rewards), ",
    "open_r1": "open-r1 is not installed here: take the built-in reward for it (docs/explanation/trl.md#rewards), ",
    "swift": "ms-swift is not installed here: name its reward 'swift:module:Class', which works without, ",
    "verl": "verl is not installed here: ",
}


def _searched() -> str:
    """The searched folders other than those of Python and its packages, as part of a sentence."""
    pythons = (Path(sys.prefix), Path(sysconfig.get_path("stdlib")))
    folders = (Path(entry or ".").resolve() for entry in (*sys.path, *FINDER.folders))
    own = [it for it in folders if it.is_dir() and not any(it.is_relative_to(folder) for folder in pythons)]
    return ", ".join(str(folder) for folder in dict.fromkeys(own))


def place_of(file: Path, function: str) -> str:
    """Path that a file must have inside a folder to be imported from it: my_rewards.py, house/tone.py."""
    module = function.partition(":")[0].replace(".", "/")
    for place in (f"{module}{file.suffix}", f"{module}/{file.name}"):
        if file.as_posix().endswith(f"/{place}"):
            return place
    searched = (folder for folder in (*sys.path, *FINDER.folders) if folder)
    folders = [folder for folder in searched if file.is_relative_to(folder)]  # of another module
    return file.relative_to(max(folders, key=len)).as_posix() if folders else file.name


def load(name: str, what: str, fault: Fault) -> Any:
    """Import what `module:function` names. Raises `fault` if it does not exist, or its module cannot be imported."""
    module, _, function = name.partition(":")
    try:
        loaded = importlib.import_module(module)
        found = getattr(loaded, function, None)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            raise _missing(module, what, fault) from error
        if advice := ELSEWHERE.get((error.name or "").partition(".")[0]):
            raise fault(
                f"{what} cannot be imported: it imports {error.name!r}; {advice}copy what it needs into a file without "
                "that import, or install the package"
            ) from error
        raise fault(
            f"{what} cannot be imported: it imports {error.name!r}, which is not there (searched: the installed "
            f"packages, {_searched()})"
        ) from error
    except (Exception, SystemExit) as error:  # the module is a user's code, which may do anything
        raise fault(f"{what} cannot be imported: {type(error).__name__}: {error}") from error
    if found is None:
        raise _not_defined(name, getattr(loaded, "__file__", None), what, fault)
    return found


def check_source(name: str, what: str, fault: Fault) -> None:
    """Raises `fault` if the module of `module:function` is missing, is not Python or does not define the function.

    The module is not run, since its imports may take seconds; mistakes that only running it would show pass.
    """
    module, _, function = name.partition(":")
    spec = _spec(module)
    if spec is None:
        raise _missing(module, what, fault)
    source = spec.loader.get_source(module) if isinstance(spec.loader, InspectLoader) else None
    if source is None:  # compiled
        return
    try:
        top = symtable.symtable(source, str(spec.origin), "exec")
    except SyntaxError as error:
        raise fault(f"{what} cannot be imported: SyntaxError: {error}") from None
    bound = {it.get_name() for it in top.get_symbols() if it.is_assigned() or it.is_imported() or it.is_namespace()}
    defines_more = "__getattr__" in bound or "import *" in source or "globals()" in source
    if function not in bound and not defines_more:
        raise _not_defined(name, spec.origin, what, fault)


def files_of(name: str, found: Any) -> list[str]:
    """The files of an imported `module:function`: of the module that names it, and of the function itself."""
    files = {sys.modules[name.partition(":")[0]].__file__, _file_of(found)}
    return sorted(filter(None, files))


def _file_of(found: Any) -> str | None:
    if isinstance(found, type):
        return inspect.getsourcefile(found)
    code = code_of(found)
    return inspect.getsourcefile(code) if hasattr(code, "__code__") else None


def code_of(function: Any) -> Any:
    """The function under decorators and `functools.partial`, or the `__call__` of an object."""
    function = inspect.unwrap(function)
    if isinstance(function, functools.partial):
        return code_of(function.func)
    return function if inspect.isroutine(function) else code_of(type(function).__call__)


def _missing(module: str, what: str, fault: Fault) -> Exception:
    """The error for a module that is in none of the folders."""
    if advice := ELSEWHERE.get(module.partition(".")[0]):
        return fault(
            f"{what} cannot be imported: {advice}copy the function into a file of your own, or install the package"
        )
    file = f"{module.replace('.', '/')}.py"
    return fault(
        f"{what} cannot be imported: there is no module {module!r}; put {file} into the working folder or beside the "
        f"configuration, or add its folder to PYTHONPATH (searched: the installed packages, {_searched()})"
    )


def _not_defined(name: str, file: str | None, what: str, fault: Fault) -> Exception:
    module, _, function = name.partition(":")
    return fault(f"{what} cannot be imported: {file or module} does not define {function!r}")


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
