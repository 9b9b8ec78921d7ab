"""Reads prompts from Parquet, JSON lines, JSON, CSV, a dataset saved to disk, or a Hugging Face name, as Arrow columns,
slice by slice."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import polars as pl

from grpo_core.config.inputs import DataConfig, DataSource, PromptSource
from grpo_core.config.run import RunConfig
from grpo_core.errors import GrpoError
from grpo_core.system.tables import read_parquet
from tasks.data.arrow_frames import to_frame
from tasks.data.columns import ColumnError, with_columns
from tasks.data.images.columns import column_of
from tasks.data.path_or_hub import data_set, is_file, is_folder, may_be_on_the_hub
from tasks.data.rows import Rows, alike, as_columns, kept_on_disk, of_frame, slice_rows
from tasks.data.text_sources import Fault, find_fault, read_text
from tasks.data.untrusted import BUFFER, checked_revision, decodable_rows

PASS_RATE = "pass_rate"
TEXT_KINDS = (".jsonl", ".json", ".csv")
KINDS = (".parquet", *TEXT_KINDS)
FORMS = (
    f"a source is a file ending in {', '.join(KINDS)} (all but .parquet also with .gz), a folder written by datasets' "
    "save_to_disk, or a dataset's name on the hub"
)


class SourceError(GrpoError):
    """Raised if prompts cannot be read; the message names the configuration key, the source and its fault."""


@dataclass(frozen=True)
class Source:
    """A source of prompts. `key`: configuration key with the value `data`. The other fields describe a dataset on the
    hub; the split also applies to a saved DatasetDict."""

    key: str
    data: str
    split: str = "train"
    subset: str | None = None
    revision: str | None = None
    origin: str = "data"  # section of the configuration with the columns and the system prompt of its rows

    def __str__(self) -> str:
        return f"{self.key} = {self.data!r}"


def load_sources(config: RunConfig) -> dict[str, Rows]:
    """Load the rows of each part of the data (see `sources_of`), with their own columns."""
    return {name: load_source(source) for name, source in sources_of(config).items()}


def with_needed_columns(read: Mapping[str, Rows], config: RunConfig) -> dict[str, Rows]:
    """Add to the sources' rows the columns that the run needs. Raises SourceError if one cannot be made."""
    sources = sources_of(config)
    return {name: _with_columns(sources[name], rows, config.data) for name, rows in read.items()}


def sources_of(config: RunConfig) -> dict[str, Source]:
    """Source of each data set: train, eval and those of `evaluation.sets`. With `data.sources`, train and eval have one
    part per source: train/NAME and eval/NAME."""
    parts = {**_prompt_sources(config.data, "train"), **held_out_sources(config.data)}
    origins = {source.name: key for key, source in config.data.origins.items() if isinstance(source, DataSource)}
    for place, it in enumerate(config.evaluation.sets):
        key, origin = f"evaluation.sets.{place}.data", origins.get(it.source or "", "data")
        parts[config.evaluation_files[it.name]] = Source(key, it.data, it.split, it.subset, it.revision, origin)
    return parts


def training_sources(data: DataConfig) -> list[Source]:
    """Sources of the training prompts: `data.train`, or that of each of `data.sources`."""
    return [*_prompt_sources(data, "train").values()]


def held_out_sources(data: DataConfig) -> dict[str, Source]:
    """Sources of the held-out prompts, by part (see `sources_of`): `data.eval`, or that of each of `data.sources`."""
    return _prompt_sources(data, "eval")


def _prompt_sources(data: DataConfig, name: str) -> dict[str, Source]:
    """Sources of a data set, train or eval, by part."""
    sources = {}
    for key, it in data.origins.items():
        place, split = getattr(it, name), getattr(it, f"{name}_split")
        part = f"{name}/{it.name}" if isinstance(it, DataSource) else name
        sources[part] = Source(f"{key}.{name}", place, split, it.subset, it.revision, key)
    return sources


def folder_of(source: Source) -> tuple[Path, bool]:
    """The folder where the paths of a source's images begin, and whether they may not leave it."""
    path = Path(source.data)
    if is_folder(path):
        return path, False
    if is_file(path):
        return path.parent, False
    import datasets

    return Path(datasets.config.HF_CACHE_HOME), True


def pooled(parts: Mapping[str, Rows]) -> dict[str, Rows]:
    """Join the parts to data sets, their rows one part after the other."""
    sets: dict[str, list[Rows]] = {}
    for part, rows in parts.items():
        sets.setdefault(data_set(part), []).append(rows)
    return {name: _one_after_the_other(own) for name, own in sets.items()}


def _one_after_the_other(parts: list[Rows]) -> Rows:
    empty = pl.concat([rows.empty for rows in parts], how="diagonal_relaxed")
    height = sum(rows.height for rows in parts)
    return Rows(empty, height, lambda: (as_columns(frame, empty) for rows in parts for frame in rows.slices()))


def unlike_columns(parts: Mapping[str, Rows]) -> Iterator[str]:
    """Yield a problem for each column for which no type holds the values of all parts of a data set unchanged."""
    for name in dict.fromkeys(map(data_set, parts)):
        own = {part: rows.schema for part, rows in parts.items() if data_set(part) == name}
        for column in dict.fromkeys(column for schema in own.values() for column in schema):
            kinds = {part: schema[column] for part, schema in own.items() if column in schema}
            if all(alike(one, other) for one, other in itertools.combinations(kinds.values(), 2)):
                continue
            said = ", ".join(f"{kind} in {part}" for part, kind in kinds.items())
            yield f"column {column!r} is {said}: give it one type by the columns of data.sources, or another name"


def load_source(source: Source) -> Rows:
    """Load a source's rows, with their own columns. Raises SourceError, with the reason, if they cannot be read."""
    if (kind := _text_kind(source)) is None:
        return _open(source)
    try:
        return kept_on_disk(_read_text(source, kind))
    except ValueError as error:
        raise _unreadable(source, error) from error


def count_prompts(source: Source) -> int:
    """Number of prompts in a source. Doesn't read them if the format contains the number."""
    kind = _text_kind(source)
    return _open(source).height if kind is None else sum(frame.height for frame in _read_text(source, kind))


def load_training_prompts(data: DataConfig) -> dict[Source, Rows]:
    """Load only the training prompts, by source. Raises SourceError, with the reason, if they cannot be read."""
    return {source: _with_columns(source, load_source(source), data) for source in training_sources(data)}


def list_pass_rates(data: DataConfig) -> list[float]:
    """Read the column `pass_rate` of the training prompts: the share of completions with which the base model is known
    to solve each. Skips sources that lack the column or make it by a user's function."""
    return [rate for source in training_sources(data) for rate in _pass_rates(source, data.origins[source.origin])]


def _pass_rates(source: Source, origin: PromptSource) -> Iterator[float]:
    how = origin.columns.get(PASS_RATE, PASS_RATE)
    if _text_kind(source) is None and how not in _open(source).columns:
        return
    for frame in _frames(source):
        kind = frame.schema.get(how)
        if kind is not None and (kind.is_numeric() or kind == pl.String):
            yield from frame[how].cast(pl.Float64, strict=False).drop_nulls()


def validated_pass_rates(prompts: Path) -> list[float]:
    """Read the column `pass_rate` of validated prompts; empty if it does not hold numbers."""
    import pyarrow.parquet as pq  # takes a tenth of a second to import

    if PASS_RATE not in pq.read_schema(prompts).names:
        return []
    rates = read_parquet(prompts, [PASS_RATE])[PASS_RATE]
    if not (rates.dtype.is_numeric() or rates.dtype == pl.String):
        return []
    return rates.cast(pl.Float64, strict=False).drop_nulls().to_list()


def load_head(data: DataConfig, rows: int) -> list[pl.DataFrame]:
    """Load the first training prompts of each source. Raises SourceError if a source is not a file, or cannot be
    read."""
    return [_head(source, data, rows) for source in training_sources(data)]


def load_image_heads(data: DataConfig, rows: int) -> list[pl.DataFrame]:
    """Load the first training prompts of each file that may have images, by its columns. Raises SourceError if one
    cannot be read."""
    files = [source for source in training_sources(data) if is_file(Path(source.data))]
    return [
        _head(source, data, rows)
        for source in files
        if _text_kind(source) or column_of(_with_columns(source, _open(source), data).schema)
    ]


def _head(source: Source, data: DataConfig, rows: int) -> pl.DataFrame:
    if not is_file(Path(source.data)):
        raise SourceError(f"{source}: not a file")
    head = of_frame(next(_frames(source)).head(rows))
    return next(_with_columns(source, head, data).slices())


def _frames(source: Source) -> Iterator[pl.DataFrame]:
    """Yield the rows as they are read: in a text file, a column's type may differ between frames."""
    kind = _text_kind(source)
    return _open(source).slices() if kind is None else _read_text(source, kind)


def needs_loading(source: str) -> bool:
    """True if the source's prompts can only be counted by loading them with datasets."""
    path = Path(source)
    return is_folder(path) or (not is_file(path) and may_be_on_the_hub(source))


def without_unstorable(rows: Rows) -> Rows:
    """Drop the columns that Parquet cannot store: integers beyond 64 bits, structs without fields, Python objects."""
    storable = [name for name, kind in rows.schema.items() if not is_unstorable(kind)]
    return rows.map(lambda frame: frame.select(storable))


def is_unstorable(kind: object) -> bool:
    """True if Parquet has no type for the values of a column of this Polars type."""
    if isinstance(kind, (pl.List, pl.Array)):
        return is_unstorable(kind.inner)
    if isinstance(kind, pl.Struct):
        return not kind.fields or any(is_unstorable(field.dtype) for field in kind.fields)
    return isinstance(kind, (pl.Int128, pl.UInt128, pl.Object))


def _with_columns(source: Source, rows: Rows, data: DataConfig) -> Rows:
    origin = data.origins[source.origin]
    try:
        rows = with_columns(rows, origin, source.origin)
    except ColumnError as error:
        raise SourceError(f"{source}: {error}") from error
    if not isinstance(origin, DataSource):
        return rows
    environment = {} if origin.environment is None else {"environment": pl.lit(origin.environment)}
    return rows.map(lambda frame: frame.with_columns(source=pl.lit(origin.name), **environment))


def _text_kind(source: Source) -> str | None:
    """Kind of a text file; None for any other source."""
    path = Path(source.data)
    return kind if is_file(path) and (kind := _kind(path)) in TEXT_KINDS else None


def _read_text(source: Source, kind: str) -> Iterator[pl.DataFrame]:
    try:
        yield from read_text(Path(source.data), kind)
    except (OSError, ValueError, ArithmeticError, pl.exceptions.PolarsError) as error:
        raise _unreadable(source, error) from error


def _open(source: Source) -> Rows:
    """Open a source that is not a text file."""
    path = Path(source.data)
    if is_file(path):
        if _kind(path) == ".parquet":
            return _parquet(source, path)
        raise SourceError(f"{source}: a file of unknown kind; {FORMS}")
    if not is_folder(path) and not may_be_on_the_hub(source.data):
        if os.path.lexists(path):
            raise SourceError(f"{source}: a pipe, a device or a link to nothing, not a file or folder; {FORMS}")
        raise SourceError(f"{source}: no such file or folder (looked in {Path.cwd()}); {FORMS}")
    import datasets

    try:
        if is_folder(path):
            if files := _split_files(path, source.split):
                return _one_after_the_other([_parquet(source, file) for file in files])
            loaded = datasets.load_from_disk(source.data)
            if isinstance(loaded, datasets.DatasetDict):
                if source.split not in loaded:
                    raise Fault(f"there is none; the splits are {', '.join(loaded) or 'none'}")
                loaded = loaded[source.split]
        else:
            revision = checked_revision(source.data, source.revision)
            loaded = datasets.load_dataset(source.data, source.subset, split=source.split, revision=revision)
        at_once = slice_rows(len(loaded), loaded.data.nbytes)
        labels = {name: kind.names for name, kind in loaded.features.items() if isinstance(kind, datasets.ClassLabel)}
        named = [pl.col(name).replace_strict(dict(enumerate(names)), default=None) for name, names in labels.items()]
        rows = loaded.with_format("arrow")  # any other would decode images
        whole = Rows(to_frame(rows[:0]), len(rows), lambda: map(to_frame, rows.iter(at_once)))
        return whole.map(lambda frame: frame.with_columns(named))
    except SourceError:
        raise
    except (Exception, pl.exceptions.PanicException) as error:
        raise SourceError(f"{source}, split {source.split!r}: {error}; {FORMS}") from error


def _split_files(folder: Path, split: str) -> list[Path]:
    """Parquet files of a split as the hub keeps them: SPLIT-00000-of-00002.parquet, in the folder or in its `data`."""
    files = (file for place in (folder, folder / "data") for file in place.glob("*-of-*.parquet"))
    return sorted(file for file in files if file.name.rsplit("-", 3)[0] == split)


def _parquet(source: Source, path: Path) -> Rows:
    """Open a Parquet file with pyarrow, which keeps only some pages of a column in memory."""
    import pyarrow as pa  # takes a tenth of a second to import
    import pyarrow.parquet as pq

    faults = (OSError, pa.ArrowException, pl.exceptions.PolarsError, pl.exceptions.PanicException)

    def read() -> Iterator[pl.DataFrame]:
        try:
            with pq.ParquetFile(path, buffer_size=BUFFER) as file:
                for batch in file.iter_batches(batch_size=decodable()):
                    yield to_frame(pa.Table.from_batches([batch]))
        except faults as error:
            raise _unreadable(source, error) from error

    try:
        with pq.ParquetFile(path) as file:
            facts, columns = file.metadata, file.schema_arrow
        if twice := [name for name, count in Counter(columns.names).items() if count > 1]:
            raise Fault(f"the column {twice[0]!r} appears twice")
        empty = to_frame(pa.Table.from_batches([], columns))  # `empty_table()` would import pandas
    except (*faults, Fault) as error:
        raise _unreadable(source, error) from error
    at_once = slice_rows(facts.num_rows, sum(facts.row_group(it).total_byte_size for it in range(facts.num_row_groups)))
    decodable = cache(lambda: decodable_rows(path, at_once))
    return Rows(empty, facts.num_rows, read)


def _kind(path: Path) -> str:
    """File ending that determines how the file is read, in lower case and without .gz."""
    name = path.name.lower()
    return Path(name.removesuffix(".gz")).suffix


def _unreadable(source: Source, error: BaseException) -> SourceError:
    path, said = Path(source.data), str(error)
    if not isinstance(error, Fault) and is_file(path) and _kind(path) in (".jsonl", ".json"):
        said = find_fault(path, _kind(path)) or said
    return SourceError(f"{source} cannot be read as {_kind(path)}: {said}")
