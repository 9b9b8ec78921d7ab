"""Counts the comparisons with each champion: every further one is a further chance to be accepted by luck.

A tag of the registered model keeps the counts as JSON: by champion (its version, or "base"), the number of `attempts`
and the digests of the `latest` comparisons in order, the last of which has that number. The champion compared with last
comes last. The tag remains when the compared versions are deleted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from typing import Any

from tasks.registry.history import CHARACTERS

ATTEMPTS = "champion.attempts"
DIGEST_CHARACTERS = 12


def take_number(
    text: str, against: str, comparison: Any, returning: Collection[str], before: Sequence[Any] = ()
) -> tuple[int, str]:
    """Number a comparison among all with the champion `against`, from 1; returns the number and the tag's new text.

    text: of the tag, empty if there is none. comparison: any JSON that identifies the comparison. The same comparison
    keeps its number; a new one gets a number above all given for this champion. returning: champions to which a
    rollback can return, or "base". before: comparisons that count before it, whether they were made or not; the new
    ones get the numbers below its own.

    If the text is too long for the column of MLflow's database, entries are removed in this order: digests of other
    champions, then of this one, the oldest first (a comparison whose digest is gone counts as a new attempt); then the
    counts of other champions, those not in `returning` first.
    """
    tried: dict[str, Any] = json.loads(text or "{}")
    own = tried[against] = tried.pop(against, {"attempts": 0, "latest": []})
    latest = own["latest"]
    digest, earlier = _digest(comparison), [it for it in map(_digest, before) if it not in latest]
    num_forgotten = own["attempts"] - len(latest)  # were counted, the oldest first: not again
    new = [it for it in dict.fromkeys([*earlier[num_forgotten:], digest]) if it not in latest]
    own["attempts"] += len(new)
    latest += new
    number = own["attempts"] - len(latest) + 1 + latest.index(digest)
    while len(text := json.dumps(tried, separators=(",", ":"))) > CHARACTERS:
        others = [champion for champion in tried if champion != against]
        remembered = [tried[it]["latest"] for it in others if tried[it]["latest"]] + [latest] * (len(latest) > 1)
        if remembered:
            del remembered[0][0]
        else:
            del tried[min(others, key=lambda champion: champion in returning)]
    return number, text


def _digest(comparison: Any) -> str:
    return hashlib.sha256(json.dumps(comparison, sort_keys=True).encode()).hexdigest()[:DIGEST_CHARACTERS]
