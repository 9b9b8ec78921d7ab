"""The champions of a registered model in order, kept in a tag of the model. An entry has the `version` (None: no
champion), `how` it became champion, and when (`at`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Entry = dict[str, Any]

ROLLED_BACK = "rolled back"
# Width of the column of MLflow's database (SqlRegisteredModelTag); PostgreSQL refuses longer values.
CHARACTERS = 5000


def written(history: Sequence[Entry]) -> str:
    """Write the history as the tag's text."""
    return json.dumps(history, separators=(",", ":"))


def bounded(history: Sequence[Entry]) -> list[Entry]:
    """Shorten a history to what its tag can hold. Entries to which no rollback returns are dropped first, then the
    others, the oldest first; the last entry, the champion, is never dropped."""
    kept = list(history)
    while len(written(kept)) > CHARACTERS:
        needed = {id(entry) for entry in reigns(kept)}
        kept.pop(next((place for place, entry in enumerate(kept[:-1]) if id(entry) not in needed), 0))
    return kept


def reigns(history: Sequence[Entry]) -> list[Entry]:
    """Entries to which rollbacks can return, the latest last: a rollback removes all that came after its target."""
    found: list[Entry] = []
    for entry in history:
        version = entry["version"]
        if entry["how"] == ROLLED_BACK and version in (reign["version"] for reign in found):
            while found[-1]["version"] != version:
                found.pop()
        elif version is not None:
            found.append(entry)
    return found
