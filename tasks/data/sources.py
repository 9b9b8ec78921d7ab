"""Prompts from Parquet, JSON lines, JSON, CSV, a dataset saved to disk, or a Hugging Face name, as Arrow columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Source:
    """Where prompts come from. `key`: of the configuration, whose value `data` is; the others: of a dataset on the hub,
    the split of a saved DatasetDict too."""

    key: str
    data: str
    split: str = "train"
    subset: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.key} = {self.data!r}"


def load_sources(config: RunConfig) -> dict[str, pl.DataFrame]:
    """The rows of each data set (train, eval and those of `evaluation.sets`), with the columns that they have."""
    return {name: load_source(source) for name, source in sources_of(config).items()}


def with_needed_columns(frames: Mapping[str, pl.DataFrame], config: RunConfig) -> dict[str, pl.DataFrame]:
    """These rows of the sources with the columns that the run needs. Raises SourceError if one cannot be made."""
    sources = sources_of(config)
    return {name: _with_columns(sources[name], frame, config.data) for name, frame in frames.items()}


def sources_of(config: RunConfig) -> dict[str, Source]:
    """The source of each data set."""
    data, files = config.data, config.evaluation_files
    sets = {
        files[it.name]: Source(f"evaluation.sets.{place}.data", it.data, it.split, it.subset, it.revision)
        for place, it in enumerate(config.evaluation.sets)
    }
    held_out = Source("data.eval", data.eval, data.eval_split, data.subset, data.revision)
    return {"train": training_source(data), "eval": held_out, **sets}


def training_source(data: DataConfig) -> Source:
    return Source("data.train", data.train, data.train_split, data.subset, data.revision)


def load_training_prompts(data: DataConfig) -> pl.DataFrame:
    """The prompts of data.train alone. Raises SourceError, which says what is wrong with them."""
    source = training_source(data)
    return _with_columns(source, load_source(source), data)


def load_source(source: Source) -> pl.DataFrame:
    """Read a source's rows, with the columns that they have. Raises SourceError, which says what is wrong with them."""
    try:
        return _plain(_open(source, checked=True).collect())
    except (pl.exceptions.PolarsError, ArithmeticError) as error:
        raise _unreadable(source, error) from error


def count_prompts(source: Source) -> int:
    """Number of prompts in a source, without reading them if the format contains it."""
    try:
        return _open(source).select(pl.len()).collect().item()
    except pl.exceptions.PolarsError as error:
        raise _unreadable(source, error) from error


def list_pass_rates(data: DataConfig) -> list[float]:
    """The column `pass_rate` of data.train: how often the base model is known to solve each prompt. Empty without one,
    and if a function of yours makes it."""
    how = data.columns.get(PASS_RATE, PASS_RATE)
    frame = _open(training_source(data))
    kind = frame.collect_schema().get(how)
    if kind is None or not (kind.is_numeric() or kind == pl.String):
        return []
    return frame.select(pl.col(how).cast(pl.Float64, strict=False).drop_nulls()).collect()[how].to_list()


def load_head(data: DataConfig, rows: int) -> pl.DataFrame:
    """The first training prompts, if data.train is a file. Raises SourceError if it is none, or cannot be read."""
    source = training_source(data)
    if not is_file(Path(source.data)):
        raise SourceError(f"{source}: not a file")
    try:
        head = _open(source).head(rows).collect()
    except pl.exceptions.PolarsError as error:
        raise _unreadable(source, error) from error
    return _with_columns(source, head, data)


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


def _with_columns(source: Source, frame: pl.DataFrame, data: DataConfig) -> pl.DataFrame:
    try:
        return with_columns(frame, data)
    except ColumnError as error:
        raise SourceError(f"{source}: {error}") from error


def _open(source: Source, checked: bool = False) -> pl.LazyFrame:
    """`checked`: columns of text files with values of several kinds are refused."""
    path = Path(source.data)
    if is_file(path):
        kind = _kind(path)
        try:
            if kind == ".parquet":
                return pl.scan_parquet(path, glob=False)
            if kind in TEXT_KINDS:
                return scan_text(path, kind, checked)
        except (OSError, ValueError) as error:
            raise _unreadable(source, error) from error
        raise SourceError(f"{source}: a file of no known kind; {FORMS}")
    if not is_folder(path) and not may_be_on_the_hub(source.data):
        raise SourceError(f"{source}: no such file or folder (looked in {Path.cwd()}); {FORMS}")
    import datasets

    try:
        if is_folder(path):
            loaded = datasets.load_from_disk(source.data)
            loaded = loaded[source.split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            loaded = datasets.load_dataset(source.data, source.subset, split=source.split, revision=source.revision)
        return loaded.to_polars().lazy()
    except Exception as error:
        raise SourceError(f"{source}, split {source.split!r}: {error}; {FORMS}") from error


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


def _unreadable(source: Source, error: Exception) -> SourceError:
    path, said = Path(source.data), str(error)
    if not isinstance(error, Fault) and is_file(path) and _kind(path) in (".jsonl", ".json"):
        said = find_fault(path, _kind(path)) or said
    return SourceError(f"{source} cannot be read as {_kind(path)}: {said}")
