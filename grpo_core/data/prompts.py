"""Validated Parquet → prompts as token ids.

Only the rows that were used last are in memory, so a data set may be larger than memory.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_core.config.inputs import ModelConfig
from grpo_core.config.run import RunConfig
from grpo_core.config.teacher import loaded_teachers
from grpo_core.data.chat import NO_OPTIONS, begin_token_problem, encode_prompts, end_token_problem
from grpo_core.data.images import ImageFiles, beside
from grpo_core.data.teacher import check_tokenizers
from grpo_core.errors import ConfigError
from grpo_core.system.processes import importing

GROUPS = 256  # row groups of a file that are kept in memory; one of a large file has few rows
PROMPTS = 2**16  # prompts whose tokens are kept in memory
AT_ONCE = 1024  # rows that are held as Python objects together

Row = dict[str, Any]


@dataclass(frozen=True)
class Prompts:
    """Rows of a prompt dataset, and the token ids of each."""

    rows: Sequence[Row]
    ids: Sequence[list[int]]
    max_length: int  # tokens of the longest
    images: ImageFiles | None = None  # those that rows have the numbers of


class FileRows(Sequence[Row]):
    """The rows of a Parquet file, read when they are asked for."""

    def __init__(self, path: Path):
        self.path, self.facts = path, pq.read_metadata(path)
        self.ends = [*accumulate(self.facts.row_group(group).num_rows for group in range(self.facts.num_row_groups))]
        self.group = lru_cache(GROUPS)(self._read_group)

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    @overload
    def __getitem__(self, row: int) -> Row: ...
    @overload
    def __getitem__(self, row: slice) -> list[Row]: ...
    def __getitem__(self, row: int | slice) -> Row | list[Row]:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        if not 0 <= row < len(self):
            raise IndexError(row)
        group = bisect(self.ends, row)
        table: pa.Table = self.group(group)
        return table.slice(row - self.ends[group] + table.num_rows, 1).to_pylist()[0]

    def __iter__(self) -> Iterator[Row]:
        with pq.ParquetFile(self.path) as file:
            for batch in file.iter_batches(batch_size=AT_ONCE):
                yield from batch.to_pylist()

    def _read_group(self, group: int) -> pa.Table:
        with pq.ParquetFile(self.path, metadata=self.facts) as file:  # threads may not share one
            return file.read_row_group(group)


def rows_at(rows: Sequence[Row], places: Sequence[int]) -> list[Row]:
    """The rows at these places. A row that is asked for several times is read once, and is the same object."""
    found = {place: rows[place] for place in dict.fromkeys(places)}
    return [found[place] for place in places]


class Encoded(Sequence[list[int]]):
    """The token ids of rows, made when they are asked for."""

    def __init__(self, rows: Sequence[Row], encode: Callable[[Sequence[Row]], list[list[int]]]):
        self.rows, self.encode = rows, encode
        self.one = lru_cache(PROMPTS)(lambda row: encode([rows[row]])[0])

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, row: int) -> list[int]: ...
    @overload
    def __getitem__(self, row: slice) -> list[list[int]]: ...
    def __getitem__(self, row: int | slice) -> list[int] | list[list[int]]:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        return self.one(row)

    def __iter__(self) -> Iterator[list[int]]:
        rows = iter(self.rows)
        while batch := [*islice(rows, AT_ONCE)]:
            yield from self.encode(batch)


def load_tokenizer(config: ModelConfig) -> Any:
    """The model's tokenizer."""
    with importing():
        import transformers

        from grpo_core.model.pretrained import from_pretrained  # keeps transformers from importing scikit-learn

        loader = transformers.AutoTokenizer  # the import of which takes seconds
    return from_pretrained(loader, config.name_or_path, config.revision)


def check_teacher_tokenizer(config: RunConfig, tokenizer: Any = None) -> None:
    """Raises ConfigError if a teacher has another tokenizer than the policy, as transformers, or the teacher's server,
    loads both. `tokenizer`: the policy's, if it is loaded."""
    if not config.teacher.is_used or config.teacher.is_policy:
        return
    own = tokenizer or load_tokenizer(config.model)
    if config.teacher.url is not None:
        from grpo_core.data.served_teacher import check_served_tokenizer  # imports httpx2

        check_served_tokenizer(config, own.get_vocab().values(), own.decode)
    for key, teacher in loaded_teachers(config).items():
        named = f"{key} = {teacher.name_or_path!r}"
        check_tokenizers(config, named, own.get_vocab(), load_tokenizer(teacher).get_vocab())


def load_prompts(
    path: Path,
    tokenizer: Any,
    options: Mapping[str, Any] = NO_OPTIONS,
    encode: Callable[[Row], list[int]] | None = None,
) -> Prompts:
    """The prompts of a validated Parquet file (column `prompt`: text or a list of messages). `options`: variables of
    the chat template; `encode`: gives a row's tokens, if the tokenizer alone does not.

    All are tokenized once, for the length of the longest. Raises ConfigError for a prompt without tokens, and for a
    tokenizer that adds its end token to prompts, or its begin token to those that have it.
    """

    def encoded(rows: Sequence[Row]) -> list[list[int]]:
        if encode:
            return [encode(row) for row in rows]
        return encode_prompts([row["prompt"] for row in rows], tokenizer, options)

    rows = FileRows(path)
    ids = Encoded(rows, encoded)
    lengths = np.fromiter(map(len, ids), np.int32, len(rows))
    if not lengths.all():
        row = int(lengths.argmin())
        raise ConfigError(
            f"{path}, row {row}: the tokenizer turns the prompt {rows[row]['prompt']!r} into no tokens; leave it out"
        )
    if problem := end_token_problem(tokenizer, rows[0]["prompt"]) or begin_token_problem(tokenizer, rows[0]["prompt"]):
        raise ConfigError(problem)
    return Prompts(rows, ids, int(lengths.max()), beside(path))
