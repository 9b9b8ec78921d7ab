"""The champions in their order, in as many characters as MLflow's database takes."""

from __future__ import annotations

import random
from typing import Any

from mlflow.store.model_registry.dbmodels.models import SqlRegisteredModelTag

from tasks.registry.history import bounded, reigns, written


def test_a_history_fits_its_column_and_leads_back_as_a_whole_one_would() -> None:
    width = SqlRegisteredModelTag.__table__.c.value.type.length
    rng = random.Random(0)
    whole: list[dict[str, Any]] = []
    kept: list[dict[str, Any]] = []
    number = 0
    for _ in range(600):
        champions = [entry["version"] for entry in reigns(kept)]
        kind = rng.choices(["promoted", "forced", "rolled back", "by hand", "deleted"], [5, 1, 3, 1, 1])[0]
        if kind == "rolled back" and len(champions) > 1:
            version = champions[-2]
        elif kind == "deleted":
            kind, version = "by hand", None
        else:
            number += 1
            version = str(number)
        entry = {"version": version, "how": kind, "at": "2026-01-01T00:00:00+00:00"}
        whole, kept = [*whole, entry], bounded([*kept, entry])
        assert len(written(kept)) <= width
        assert kept[-1] == entry
        left, right = ([it["version"] for it in reigns(history)] for history in (kept, whole))
        assert left == right[-len(left) :]
    assert number > 300
    assert len(left) > 60
    for _ in range(50):
        version = reigns(kept)[-2]["version"]
        kept = bounded([*kept, {**entry, "version": version, "how": "rolled back"}])
        assert len(written(kept)) <= width
        assert reigns(kept)[-1]["version"] == version
