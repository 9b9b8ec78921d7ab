"""Prompts from Parquet, JSON lines, JSON, CSV, a dataset saved to disk, or a Hugging Face name, as a DataFrame."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from tasks.stage import StageError

READERS = {
    ".parquet": pd.read_parquet,
    ".jsonl": lambda path: pd.DataFrame([json.loads(line) for line in path.read_text().splitlines() if line.strip()]),
    ".json": lambda path: pd.DataFrame(json.loads(path.read_text())),
    # Text stays text: "007" keeps its zeros, and "NA" is an answer, not a gap.
    ".csv": lambda path: pd.read_csv(path, dtype=str, keep_default_na=False),
}


def load_source(key: str, source: str, split: str) -> pd.DataFrame:
    """Read the prompts that configuration key `key` names; StageError says what is wrong with the source."""
    path = Path(source)
    reader = READERS.get(path.suffix)
    if reader and not path.is_dir():
        if not path.is_file():
            raise StageError(f"{key} = {source!r}: no such file (looked in {Path.cwd()})")
        try:
            return reader(path)
        except Exception as error:
            raise StageError(f"{key} = {source!r} cannot be read as {path.suffix}: {error}") from error
    import datasets

    try:
        if path.is_dir():
            loaded = datasets.load_from_disk(source)
            return (loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded).to_pandas()
        return datasets.load_dataset(source, split=split).to_pandas()
    except Exception as error:
        raise StageError(
            f"{key} = {source!r}, split {split!r}: {error}. A source is a file ending in {', '.join(READERS)}, "
            "a folder written by datasets' save_to_disk, or a dataset's name on the hub"
        ) from error
