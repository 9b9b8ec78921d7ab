"""Prompts from Parquet, JSON lines, JSON, CSV, a dataset saved to disk, or a Hugging Face name, as Arrow columns."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from grpo_core.config import DataConfig

PASS_RATE = "pass_rate"
READERS = {
    ".parquet": pl.scan_parquet,
    ".jsonl": lambda path: pl.scan_ndjson(path, infer_schema_length=None),
    ".json": lambda path: pl.read_json(path, infer_schema_length=None).lazy(),
    # Text stays text: "007" keeps its zeros, and "NA" is an answer, not a gap.
    ".csv": lambda path: pl.scan_csv(path, infer_schema=False),
}


class SourceError(ValueError):
    """Prompts that cannot be read; the message names the configuration key, the source and what is wrong with it."""


def load_sources(data: DataConfig) -> dict[str, pl.DataFrame]:
    """The training and the held-out prompts."""
    return {
        "train": load_source("data.train", data.train, data.train_split),
        "eval": load_source("data.eval", data.eval, data.eval_split),
    }


def load_source(key: str, source: str, split: str) -> pl.DataFrame:
    """Read the prompts that configuration key `key` names; SourceError says what is wrong with the source."""
    frame = _open(key, source, split)
    try:
        return frame.collect()
    except pl.exceptions.PolarsError as error:
        raise _unreadable(key, source, error) from error


def count_prompts(key: str, source: str, split: str) -> int:
    """How many prompts a source holds, without reading them where its format says so."""
    try:
        return _open(key, source, split).select(pl.len()).collect().item()
    except pl.exceptions.PolarsError as error:
        raise _unreadable(key, source, error) from error


def list_pass_rates(key: str, source: str, split: str) -> list[float]:
    """A source's column `pass_rate`: how often the base model is known to solve each prompt. Empty without one."""
    frame = _open(key, source, split)
    kind = frame.collect_schema().get(PASS_RATE)
    if kind is None or not (kind.is_numeric() or kind == pl.String):
        return []
    return frame.select(pl.col(PASS_RATE).cast(pl.Float64, strict=False).drop_nulls()).collect()[PASS_RATE].to_list()


def _open(key: str, source: str, split: str) -> pl.LazyFrame:
    path = Path(source)
    reader = READERS.get(path.suffix)
    if reader and not path.is_dir():
        if not path.is_file():
            raise SourceError(f"{key} = {source!r}: no such file (looked in {Path.cwd()})")
        try:
            return reader(path)
        except Exception as error:
            raise _unreadable(key, source, error) from error
    import datasets

    try:
        if path.is_dir():
            loaded = datasets.load_from_disk(source)
            loaded = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            loaded = datasets.load_dataset(source, split=split)
        return loaded.to_polars().lazy()
    except Exception as error:
        raise SourceError(
            f"{key} = {source!r}, split {split!r}: {error}. A source is a file ending in {', '.join(READERS)}, "
            "a folder written by datasets' save_to_disk, or a dataset's name on the hub"
        ) from error


def _unreadable(key: str, source: str, error: Exception) -> SourceError:
    return SourceError(f"{key} = {source!r} cannot be read as {Path(source).suffix}: {error}")
