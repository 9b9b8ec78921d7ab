"""Configurations with two sources of prompts: sums, whose answers are scored, and lines, whose lengths are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from tests.conftest import config_values, write_sums


def two_sources(model: Path, folder: Path, **keys: Any) -> dict[str, Any]:
    """The configuration; its data are written into `folder`. The lines have other columns than the sums."""
    write_sums(folder / "sums.parquet", 10, 34)
    write_sums(folder / "sums-eval.parquet", 60, 70)
    for name, numbers in (("lines", range(100, 116)), ("lines-eval", range(200, 206))):
        pl.DataFrame({"line": [f"{n}=" for n in numbers]}).write_parquet(folder / f"{name}.parquet")
    values = config_values(model, folder, **keys)
    values["data"] = {
        "sources": [
            {
                "name": "sums",
                "train": str(folder / "sums.parquet"),
                "eval": str(folder / "sums-eval.parquet"),
                "rewards": ["numeric_match"],
            },
            {
                "name": "lines",
                "train": str(folder / "lines.parquet"),
                "eval": str(folder / "lines-eval.parquet"),
                "columns": {"prompt": "line"},
                "epochs": 0.5,
                "rewards": ["length"],
                "max_completion_length": 3,
            },
        ]
    }
    return values
