"""The page on the sampling correction shows what was measured."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SHOWN = ("own completions", "none", "token_truncate", "sequence_truncate", "sequence_mask")


def test_the_benchmark_page_has_the_cosines_and_lengths_that_were_measured() -> None:
    page = (RESULTS.parent / "README.md").read_text()
    for row in json.loads((RESULTS / "correction.json").read_text())["rows"]:
        cells = [f"{row['cosine'][name]:.2f}, {row['length_along'][name]:.2f}" for name in SHOWN]
        assert f"| {row['length']:,} | {row['kl_per_token']:g} | {' | '.join(cells)} |" in page
