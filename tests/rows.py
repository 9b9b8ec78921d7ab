"""Rows of data, which are read slice by slice, as one frame."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import polars as pl

from grpo_core.config.run import RunConfig
from tasks import validate
from tasks.data.rows import Rows


def whole(rows: Rows) -> pl.DataFrame:
    return pl.concat(rows.slices())


def screen(config: RunConfig) -> Any:
    """What `tasks.validate.screen` says, with frames instead of rows."""
    screened = validate.screen(config)
    kept, dropped = ({name: whole(rows) for name, rows in sets.items()} for sets in (screened.kept, screened.dropped))
    return replace(screened, kept=kept, dropped=dropped)
