"""Rows of data: as JSON Lines, and as one frame although they are read slice by slice."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl

from grpo_core.config.run import RunConfig
from tasks import screen as screening
from tasks.data.rows import Rows


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def whole(rows: Rows) -> pl.DataFrame:
    return pl.concat(rows.slices())


def screen(config: RunConfig) -> Any:
    """What `tasks.screen.screen` says, with frames instead of rows."""
    screened = screening.screen(config)
    kept, dropped = ({name: whole(rows) for name, rows in sets.items()} for sets in (screened.kept, screened.dropped))
    return replace(screened, kept=kept, dropped=dropped)
