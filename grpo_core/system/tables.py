"""Reading of tables by their exact path.

Polars takes `[`, `*` and `?` in a path for a pattern: it would read whatever files match it, or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> pl.DataFrame:
    """Read a Parquet file, or only these columns of it."""
    return pl.read_parquet(path, columns=None if columns is None else list(columns), glob=False)


def read_ipc(path: Path) -> pl.DataFrame:
    """Read an Arrow file."""
    return pl.read_ipc(path.read_bytes())
