"""Whoever promotes the best-looking of many versions that are no better rarely succeeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.looks import p_values_of, promoted

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 5, 20])
def test_the_best_looking_of_many_versions_that_are_no_better_is_rarely_promoted(count: int) -> None:
    found = promoted(*p_values_of(400, count, 200, 0.4, gain=0.0))
    shares = {name: float(of_each.any(axis=1).mean()) for name, of_each in found.items()}
    assert shares["best-looking, counted by its place"] <= shares["all tried"] < 0.08  # 0.05, and three standard errors
    assert count == 1 or shares["best-looking, counted as attempt 1"] > 0.05 * (1 + count / 20)


def test_the_page_on_promotions_has_the_table_that_was_simulated() -> None:
    page = (ROOT / "docs" / "how-to" / "promote.md").read_text()
    result = (ROOT / "benchmarks" / "results" / "looks.md").read_text()
    shown = [row.partition(": ")[2].partition(" | ")[2] for row in result.splitlines() if "by its place" in row]
    assert len(shown) == 9 and all(share <= 5 for row in shown[:3] for share in _shares(row))
    for row in (shown[0], shown[1], shown[4], shown[6]):
        assert row in page


def _shares(row: str) -> list[float]:
    return [float(cell.removesuffix(" % ")) for cell in row.rstrip("|").split("| ")]
