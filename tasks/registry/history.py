"""The champions of a registered model in their order, as a tag of the model keeps them. Entries: `version` (None: no
champion), `how` it came to that, and when (`at`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Entry = dict[str, Any]

ROLLED_BACK = "rolled back"
# Width of the column of MLflow's database (SqlRegisteredModelTag); PostgreSQL refuses what is longer.
CHARACTERS = 5000


def written(history: Sequence[Entry]) -> str:
    """The tag's text."""
    return json.dumps(history, separators=(",", ":"))


def bounded(history: Sequence[Entry]) -> list[Entry]:
    """As much of a history as its tag holds. Entries that no rollback leads back to are dropped first, then the others,
    both from the oldest on; the last, which is the champion, is never dropped."""
    kept = list(history)
    while len(written(kept)) > CHARACTERS:
        needed = {id(entry) for entry in reigns(kept)}
        kept.pop(next((place for place, entry in enumerate(kept[:-1]) if id(entry) not in needed), 0))
    return kept


def reigns(history: Sequence[Entry]) -> list[Entry]:
    """The entries that rollbacks lead back through, the latest last: a rollback takes back what came after."""
    found: list[Entry] = []
    for entry in history:
        version = entry["version"]
        if entry["how"] == ROLLED_BACK and version in (reign["version"] for reign in found):
            while found[-1]["version"] != version:
                found.pop()
        elif version is not None:
            found.append(entry)
    return found
