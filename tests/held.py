"""Entries of a mapping for the time of a block, such as environment variables or modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def held(mapping: MutableMapping[str, Any], given: Mapping[str, Any], ours: str = "") -> Iterator[None]:
    """A mapping with these entries. Afterwards they, and all whose names begin with `ours`, are as before.

    `mock.patch.dict` would empty the mapping for a moment, and another thread sees that: it finds no variable, or
    imports a second copy of a module that is there.
    """
    before = dict(mapping)
    mapping.update(given)
    try:
        yield
    finally:
        for name in [name for name in [*mapping, *before] if name in given or name.startswith(ours)]:
            if name not in before:
                mapping.pop(name, None)
            elif mapping.get(name) != before[name]:
                mapping[name] = before[name]
