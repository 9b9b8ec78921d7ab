"""Built-in tools and environments by name, and the files that define tools and environments."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from grpo_core.config.environment import EnvironmentConfig
from grpo_core.errors import GrpoError

ADAPTERS = {  # they hand what the policy writes to other people's code
    "openenv": "grpo_core.environments.adapters.open_env:OpenEnv",
    "reasoning-gym": "grpo_core.environments.adapters.reasoning_gym:ReasoningGym",
    "textarena": "grpo_core.environments.adapters.textarena:TextArena",
}
BUILTIN = {
    "calculator": "grpo_core.environments.builtin.calculator:calculator",
    "python": "grpo_core.environments.builtin.python:python",
    **ADAPTERS,
}


# Raise a version when the tool or environment answers otherwise: runs that used it are then trained again.
VERSIONS = dict.fromkeys(BUILTIN, 1)


class EnvironmentsError(GrpoError):
    """Environments or tools that cannot be used; the message says which, why and what to do."""


def source_of(name: str) -> str:
    """`module:name` of a tool or class. Raises EnvironmentsError if the name is neither that nor built in."""
    if ":" not in name and name not in BUILTIN:
        raise EnvironmentsError(
            f"no built-in tool or environment is called {name!r}; there are {', '.join(BUILTIN)}; your own is written "
            "module:name"
        )
    return BUILTIN.get(name, name)


def named(config: EnvironmentConfig) -> list[str]:
    """All tools and classes that a configuration names."""
    return [*config.factories.values(), *config.tools]


def file_of(name: str) -> Path:
    """The file of the module that defines a tool or class. Raises EnvironmentsError if there is no such module."""
    module = source_of(name).partition(":")[0]
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # of a package above it, or not a module's name
        spec = None
    if spec is None or spec.origin is None:
        raise EnvironmentsError(
            f"environment: {name!r} cannot be imported: there is no module {module!r}; put "
            f"{module.replace('.', '/')}.py into the working folder or beside the configuration, or add its folder to "
            "PYTHONPATH"
        )
    return Path(spec.origin)


def sources(config: EnvironmentConfig) -> dict[str, str]:
    """Identity of each tool and class, by its name in the configuration: the hash of its file, or a built-in one's
    version."""
    return {
        name: f"version {VERSIONS[name]}"
        if name in VERSIONS
        else hashlib.blake2b(file_of(name).read_bytes(), digest_size=16).hexdigest()
        for name in named(config)
    }
