"""The champions in their order, and the numbers of attempts against them, in as many characters as MLflow's database
takes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from mlflow.store.model_registry.dbmodels.models import SqlRegisteredModelTag

from tasks.registry.history import bounded, reigns, written
from tasks.registry.spending import take_number

WIDTH = SqlRegisteredModelTag.__table__.c.value.type.length


def test_a_history_fits_its_column_and_leads_back_as_a_whole_one_would() -> None:
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
        assert len(written(kept)) <= WIDTH
        assert kept[-1] == entry
        left, right = ([it["version"] for it in reigns(history)] for history in (kept, whole))
        assert left == right[-len(left) :]
    assert number > 300
    assert len(left) > 60
    for _ in range(50):
        version = reigns(kept)[-2]["version"]
        kept = bounded([*kept, {**entry, "version": version, "how": "rolled back"}])
        assert len(written(kept)) <= WIDTH
        assert reigns(kept)[-1]["version"] == version


def test_three_hundred_comparisons_with_a_champion_keep_their_numbers() -> None:
    text = ""
    rules = {"metric": "reward", "confidence": 0.9}
    for _ in range(2):
        for number in range(1, 301):
            taken, text = take_number(text, "1", [str(number), rules], {"base"})
            assert taken == number
            assert len(text) <= WIDTH
    reordered = dict(reversed(rules.items()))
    assert take_number(text, "1", ["7", reordered], {"base"})[0] == 7
    assert take_number(text, "1", ["7", {}], {"base"})[0] == 301


@pytest.mark.slow
def test_comparisons_that_were_not_made_count_once_however_many_are_forgotten() -> None:
    text, before = "", list[str]()
    for place in range(1, 1001):
        for _ in range(2):
            number, text = take_number(text, "1", f"version {place}", {"base"}, before)
            assert number == place and len(text) <= WIDTH
        before.append(f"version {place}")
    assert take_number("", "1", "version 4", {"base"}, ["version 1", "version 2", "version 1", "version 4"])[0] == 3


@pytest.mark.slow
def test_no_two_comparisons_with_a_champion_share_a_number_whatever_was_forgotten() -> None:
    rng = random.Random(0)
    champions = ["base", *map(str, range(1, 71))]  # as many as the history has room for
    text = ""
    numbers: dict[str, dict[int, int]] = {champion: {} for champion in champions}  # comparison by number
    latest: dict[tuple[str, int], int] = {}
    num_kept = num_forgotten = 0
    for step in range(3000):
        champion = rng.choice(champions[: 1 + step // 40])
        comparison = rng.randrange(60)
        before = latest.get((champion, comparison))
        number, text = take_number(text, champion, comparison, champions)
        assert len(text) <= WIDTH
        if number == before:
            num_kept += 1
        else:
            assert number == 1 + len(numbers[champion]), "the next one that is free"
            num_forgotten += before is not None
        numbers[champion][number] = comparison
        latest[champion, comparison] = number
        assert take_number(text, champion, comparison, champions) == (number, text)
    assert num_kept > 100 and num_forgotten > 100


def test_counts_of_champions_that_may_return_outlast_those_of_hundreds_that_do_not() -> None:
    returning = ["base", *map(str, range(1, 71))]
    text = ""
    for champion in [*returning, *map(str, range(71, 500))]:
        for comparison in range(3):
            number, text = take_number(text, champion, comparison, returning)
            assert (number, len(text) <= WIDTH) == (comparison + 1, True)
    assert [take_number(text, champion, "another", returning)[0] for champion in [*returning, "499"]] == [4] * 72
