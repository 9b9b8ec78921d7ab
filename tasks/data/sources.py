"""Prompts from Parquet, JSON lines, JSON, CSV, a dataset saved to disk, or a Hugging Face name, as Arrow columns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import polars as pl

from grpo_core.config.inputs import DataConfig
from grpo_core.config.run import RunConfig
from grpo_core.errors import GrpoError
from tasks.data.columns import ColumnError, with_columns
from tasks.data.places import is_file, is_folder, may_be_on_the_hub
from tasks.data.text_sources import Fault, find_fault, scan_text

PASS_RATE = "pass_rate"
TEXT_KINDS = (".jsonl", ".json", ".csv")
KINDS = (".parquet", *TEXT_KINDS)
FORMS = (
    f"a source is a file ending in {', '.join(KINDS)} (all but .parquet also with .gz), a folder written by datasets' "
    "save_to_disk, or a dataset's name on the hub"
)


class SourceError(GrpoError):
    """Prompts that cannot be read; the message names the configuration key, the source and its fault."""


def load_sources(config: RunConfig) -> dict[str, pl.DataFrame]:
    """The rows of each data set (train, eval and those of `evaluation.sets`), with the columns that they have."""
    return {name: load_source(*source) for name, source in _sources(config).items()}


def with_needed_columns(frames: Mapping[str, pl.DataFrame], config: RunConfig) -> dict[str, pl.DataFrame]:
    """These rows of the sources with the columns that the run needs. Raises SourceError if one cannot be made."""
    sources = _sources(config)
    return {name: _with_columns(sources[name][:2], frame, config.data) for name, frame in frames.items()}


def _sources(config: RunConfig) -> dict[str, tuple[str, str, str, str | None]]:
    """Key, name, split and revision of each data set's source."""
    data = config.data
    return {
        "train": ("data.train", data.train, data.train_split, data.revision),
        "eval": ("data.eval", data.eval, data.eval_split, data.revision),
        **{
            config.evaluation_files[each.name]: (f"evaluation.sets.{place}.data", each.data, each.split, each.revision)
            for place, each in enumerate(config.evaluation.sets)
        },
    }


def load_training_prompts(data: DataConfig) -> pl.DataFrame:
    """The prompts of data.train alone. Raises SourceError, which says what is wrong with them."""
    source = ("data.train", data.train)
    return _with_columns(source, load_source(*source, data.train_split, data.revision), data)


def load_source(key: str, source: str, split: str, revision: str | None = None) -> pl.DataFrame:
    """Read the rows that the configuration key `key` names, with the columns that they have. Raises SourceError, which
    says what is wrong with them."""
    try:
        return _plain(_open(key, source, split, revision, checked=True).collect())
    except (pl.exceptions.PolarsError, ArithmeticError) as error:
        raise _unreadable(key, source, error) from error


def count_prompts(key: str, source: str, split: str, revision: str | None = None) -> int:
    """Number of prompts in a source, without reading them if the format contains it."""
    try:
        return _open(key, source, split, revision).select(pl.len()).collect().item()
    except pl.exceptions.PolarsError as error:
        raise _unreadable(key, source, error) from error


def list_pass_rates(data: DataConfig) -> list[float]:
    """The column `pass_rate` of data.train: how often the base model is known to solve each prompt. Empty without one,
    and if a function of yours makes it."""
    how = data.columns.get(PASS_RATE, PASS_RATE)
    frame = _open("data.train", data.train, data.train_split, data.revision)
    kind = frame.collect_schema().get(how)
    if kind is None or not (kind.is_numeric() or kind == pl.String):
        return []
    return frame.select(pl.col(how).cast(pl.Float64, strict=False).drop_nulls()).collect()[how].to_list()


def load_head(data: DataConfig, rows: int) -> pl.DataFrame:
    """The first training prompts, if data.train is a file. Raises SourceError if it is none, or cannot be read."""
    source = data.train
    if not is_file(Path(source)):
        raise SourceError(f"data.train = {source!r}: not a file")
    try:
        head = _open("data.train", source, "").head(rows).collect()
    except pl.exceptions.PolarsError as error:
        raise _unreadable("data.train", source, error) from error
    return _with_columns(("data.train", source), head, data)


def needs_loading(source: str) -> bool:
    """Whether its prompts can only be counted by loading them with datasets."""
    path = Path(source)
    return is_folder(path) or (not is_file(path) and may_be_on_the_hub(source))


def without_unstorable(frame: pl.DataFrame) -> pl.DataFrame:
    """The columns that Parquet knows: none of integers beyond 64 bits, structs without fields, Python objects."""
    return frame.select(name for name, kind in frame.schema.items() if not is_unstorable(kind))


def is_unstorable(kind: object) -> bool:
    """Whether Parquet has no type for the values of a column of this Polars type."""
    if isinstance(kind, (pl.List, pl.Array)):
        return is_unstorable(kind.inner)
    if isinstance(kind, pl.Struct):
        return not kind.fields or any(is_unstorable(field.dtype) for field in kind.fields)
    return isinstance(kind, (pl.Int128, pl.UInt128, pl.Object))


def _with_columns(source: tuple[str, str], frame: pl.DataFrame, data: DataConfig) -> pl.DataFrame:
    try:
        return with_columns(frame, data)
    except ColumnError as error:
        raise SourceError(f"{source[0]} = {source[1]!r}: {error}") from error


def _open(key: str, source: str, split: str, revision: str | None = None, checked: bool = False) -> pl.LazyFrame:
    """`checked`: columns of text files with values of several kinds are refused."""
    path = Path(source)
    if is_file(path):
        kind = _kind(path)
        try:
            if kind == ".parquet":
                return pl.scan_parquet(path, glob=False)
            if kind in TEXT_KINDS:
                return scan_text(path, kind, checked)
        except (OSError, ValueError) as error:
            raise _unreadable(key, source, error) from error
        raise SourceError(f"{key} = {source!r}: a file of no known kind; {FORMS}")
    if not is_folder(path) and not may_be_on_the_hub(source):
        raise SourceError(f"{key} = {source!r}: no such file or folder (looked in {Path.cwd()}); {FORMS}")
    import datasets

    try:
        if is_folder(path):
            loaded = datasets.load_from_disk(source)
            loaded = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            loaded = datasets.load_dataset(source, split=split, revision=revision)
        return loaded.to_polars().lazy()
    except Exception as error:
        raise SourceError(f"{key} = {source!r}, split {split!r}: {error}; {FORMS}") from error


def _kind(path: Path) -> str:
    """The ending that says how a file is read, in lower case and without .gz."""
    name = path.name.lower()
    return Path(name.removesuffix(".gz")).suffix


def _plain(frame: pl.DataFrame) -> pl.DataFrame:
    """Columns of the types that rewards know: encoded text as text, arrays of one length as lists."""
    encoded = [name for name, kind in frame.schema.items() if isinstance(kind, (pl.Categorical, pl.Enum))]
    arrays = {name: kind for name, kind in frame.schema.items() if isinstance(kind, pl.Array)}
    casts = [pl.col(encoded).cast(pl.String), *(pl.col(n).cast(pl.List(kind.inner)) for n, kind in arrays.items())]
    return frame.with_columns(casts)


def _unreadable(key: str, source: str, error: Exception) -> SourceError:
    path, said = Path(source), str(error)
    if not isinstance(error, Fault) and is_file(path) and _kind(path) in (".jsonl", ".json"):
        said = find_fault(path, _kind(path)) or said
    return SourceError(f"{key} = {source!r} cannot be read as {_kind(path)}: {said}")
