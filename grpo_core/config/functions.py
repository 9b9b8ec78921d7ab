"""Names of reward functions: `module:function`, or `framework:module:function` for one with another framework's
signature."""

from __future__ import annotations

FRAMEWORKS = ("verl", "swift")


def framework_of(name: str) -> str | None:
    """The framework that is named in front of `module:function`; None if there is none."""
    first, _, rest = name.partition(":")
    return first if first in FRAMEWORKS and ":" in rest else None


def own_name(name: str) -> str:
    """`module:function` without the framework."""
    return name.partition(":")[2] if framework_of(name) else name
