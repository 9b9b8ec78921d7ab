"""Prompts from Parquet, JSON lines, JSON, CSV, a dataset saved to disk, or a Hugging Face name, as Arrow columns."""

from __future__ import annotations

import glob
import json
from pathlib import Path

import polars as pl

from grpo_core.config import RunConfig
from grpo_core.errors import GrpoError

PASS_RATE = "pass_rate"
READERS = {
    ".parquet": lambda path: pl.scan_parquet(path, glob=False),
    ".jsonl": lambda path: pl.scan_ndjson(glob.escape(str(path)), infer_schema_length=None),
    # Strict: a column whose values are of several kinds is refused, not made text of.
    ".json": lambda path: pl.DataFrame(json.loads(path.read_text()), infer_schema_length=None).lazy(),
    # Text stays text: "007" keeps its zeros, and "NA" is an answer, not a gap.
    ".csv": lambda path: pl.scan_csv(path, infer_schema=False, glob=False),
}
LONGEST_LINE = 2**24  # bytes


class SourceError(GrpoError):
    """Prompts that cannot be read; the message names the configuration key, the source and what is wrong with it."""


def load_sources(config: RunConfig) -> dict[str, pl.DataFrame]:
    """The prompts of each data set: train, eval and those of `evaluation.sets`."""
    data = config.data
    frames = {
        "train": load_source("data.train", data.train, data.train_split),
        "eval": load_source("data.eval", data.eval, data.eval_split),
    }
    for place, each in enumerate(config.evaluation.sets):
        key = f"evaluation.sets.{place}.data"
        frames[config.evaluation_files[each.name]] = load_source(key, each.data, each.split)
    return frames


def load_source(key: str, source: str, split: str) -> pl.DataFrame:
    """Read the prompts that configuration key `key` names; SourceError says what is wrong with the source."""
    frame = _open(key, source, split)
    try:
        if Path(source).suffix == ".jsonl":
            _refuse_mixed_columns(source)
        return _plain(frame.collect())
    except (pl.exceptions.PolarsError, ArithmeticError, ValueError) as error:
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


def _refuse_mixed_columns(source: str) -> None:
    """ValueError for a column with values of several kinds: polars would make text of them all."""
    from pyarrow import ArrowInvalid, json  # takes half a second to import, which planning does not need

    try:
        json.read_json(source, json.ReadOptions(block_size=LONGEST_LINE))
    except ArrowInvalid as error:
        raise ValueError(f"{error}; a column holds values of one kind") from error


def _plain(frame: pl.DataFrame) -> pl.DataFrame:
    """Columns of the types that Parquet and rewards know: encoded text as text, arrays of one length as lists.

    Without those that neither knows: integers beyond 64 bits, structs without fields, Python objects.
    """
    storable = [name for name, kind in frame.schema.items() if not _is_unstorable(kind)]
    encoded = [name for name in storable if isinstance(frame.schema[name], (pl.Categorical, pl.Enum))]
    arrays = {name: kind for name, kind in frame.schema.items() if isinstance(kind, pl.Array)}
    casts = [pl.col(encoded).cast(pl.String), *(pl.col(n).cast(pl.List(kind.inner)) for n, kind in arrays.items())]
    return frame.select(storable).with_columns(casts)


def _is_unstorable(kind: pl.DataType) -> bool:
    if isinstance(kind, (pl.List, pl.Array)):
        return _is_unstorable(kind.inner)
    if isinstance(kind, pl.Struct):
        return not kind.fields or any(_is_unstorable(field.dtype) for field in kind.fields)
    return isinstance(kind, (pl.Int128, pl.UInt128, pl.Object))


def _unreadable(key: str, source: str, error: Exception) -> SourceError:
    return SourceError(f"{key} = {source!r} cannot be read as {Path(source).suffix}: {error}")
