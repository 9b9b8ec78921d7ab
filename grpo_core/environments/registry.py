"""Built-in tools and environments by name."""

from __future__ import annotations

from grpo_core.errors import GrpoError

BUILTIN = {"calculator": "grpo_core.environments.builtin.calculator:calculator"}


def source_of(name: str) -> str:
    """`module:name` of a tool or class. Raises GrpoError if the name is neither that nor built in."""
    if ":" not in name and name not in BUILTIN:
        raise GrpoError(
            f"no built-in tool or environment is called {name!r}; there are {', '.join(BUILTIN)}; your own is written "
            "module:name"
        )
    return BUILTIN.get(name, name)
