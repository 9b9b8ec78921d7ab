"""A run's data contract as YAML, for people who make its data without its model or configuration."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandera.polars as pa
import polars as pl

from grpo_core.config.columns import columns_read, is_function
from grpo_core.config.inputs import DataConfig, PromptSource
from grpo_core.rewards.contract import Reward
from tasks.data.contract import may_be_null, needed_columns
from tasks.data.own_schema import load_schema

TEXT = r"\S"
TYPES = {str: pl.String(), bool: pl.Boolean()}  # numbers and lists may be of several types
PROMPT = "the prompt: text, or a list of messages {role, content} that ends with the user's; not blank, none twice"


def contract_as_yaml(data: DataConfig, origin: PromptSource, rewards: list[Reward], shown: Sequence[str] = ()) -> str:
    """Write the columns that a run's data sets need, in pandera's form, with all rules that this form can express;
    comments contain the others. `origin`: the part of `data` that defines how columns are made; `rewards`: those that
    score its completions; `shown`: columns that teacher.template shows. Raises ConfigError if data.schema cannot be
    used."""
    columns = dict(_columns(origin, needed_columns(rewards, shown)))
    said = [
        f"{column} is made by {how}: describe the columns that it reads yourself"
        for column, how in origin.columns.items()
        if is_function(how)
    ]
    if data.schema:
        own = load_schema(data.schema)
        for name, column in own.columns.items():
            columns[name] = _both(columns[name], column) if name in columns else column
        checks = [check for column in own.columns.values() for check in column.checks or [] if not _is_written(check)]
        said += [f"{data.schema} also checks {check.name}" for check in [*checks, *(own.checks or [])]]
    said.append("grpo data check FILE --schema THIS_FILE checks a file against this")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about rules that are not written
        written = pa.DataFrameSchema(columns, name="contract").to_yaml()
    return "".join(f"# {line}\n" for line in said) + str(written)


def _columns(origin: PromptSource, needed: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, pa.Column]]:
    """Yield the columns that a data set must have before `data.columns` makes others from them. `needed`: see
    `needed_columns`."""
    for column, readers in {"prompt": {}, **needed}.items():
        how = origin.columns.get(column, column)
        for name in columns_read(how):
            if "." in name:  # it may be a field of a column of objects
                continue
            if column == "prompt":
                yield name, pa.Column(None, description=PROMPT if name == how else "part of the prompt")
                continue
            kinds, taken_as_it_is = [*readers.values()], name == how
            optional = all(map(may_be_null, kinds))
            types = {TYPES.get(kind) for kind in kinds} if taken_as_it_is else {None}
            (dtype,) = types if len(types) == 1 else {None}
            checks = [pa.Check.str_contains(TEXT)] if dtype == pl.String and not optional else []
            read = ", ".join(f"{reader} ({_words(kind)})" for reader, kind in readers.items())
            described = f"read by {read}" + ("" if taken_as_it_is else f", as {column} = {how!r}")
            yield name, pa.Column(dtype, checks, nullable=optional, description=described)


def _both(ours: pa.Column, own: pa.Column) -> pa.Column:
    """Combine two columns' rules."""
    return pa.Column(
        own.dtype.type if own.dtype else ours.dtype and ours.dtype.type,
        [*(ours.checks or []), *(own.checks or [])],
        nullable=ours.nullable and own.nullable,
        description=own.description or ours.description,
    )


def _words(kind: Any) -> str:
    return "any type" if kind is Any else getattr(kind, "__name__", str(kind))


def _is_written(check: pa.Check) -> bool:
    """True if pandera writes the check as YAML; for others, it only warns."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        pa.DataFrameSchema({"column": pa.Column(pl.String, check)}).to_yaml()
    return not any("Only registered checks" in str(warning.message) for warning in found)
