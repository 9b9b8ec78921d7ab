"""Configurations with two sources of prompts: sums, whose answers are scored, and lines, whose lengths are."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import polars as pl

from grpo_core.config.files import dump_config, parse_config
from grpo_core.planning.plan import make_plan, plan_inputs
from tasks.data.sources import data_set
from tests.conftest import config_values, write_sums
from tests.rows import screen


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


def sources_run(folder: Path, values: dict[str, Any]) -> Path:
    """A run directory as the stages validate and plan leave it."""
    config = parse_config(values)
    screened = screen(config)
    assert not screened.refused, screened.shape
    (folder / "dataset").mkdir(parents=True)
    for name, frame in screened.kept.items():
        frame.write_parquet(folder / "dataset" / f"{name}.parquet")
    counts = [part["num_prompts"] for name, part in screened.report["parts"].items() if data_set(name) == "train"]
    (folder / "config.toml").write_text(dump_config(config))
    (folder / "plan.json").write_text(json.dumps({"plan": dataclasses.asdict(make_plan(plan_inputs(config, *counts)))}))
    return folder
