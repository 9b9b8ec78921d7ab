"""Users' own rules about data sets' columns: `data.schema`, or a contract written as YAML."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandera.polars as pa
import polars as pl

from grpo_core.data import own_code
from grpo_core.errors import ConfigError
from tasks.data.path_or_hub import is_file
from tasks.data.repeats import NONE, key_of, shown
from tasks.data.rows import Rows

RULE = "own_schema"
CHANGES = "and the training would read the rows unchanged"
_NO_CASE = pl.DataFrame(schema={"failure_case": pl.String, "column": pl.String, "check": pl.String, "index": pl.Int64})


def load_schema(name: str) -> pa.DataFrameSchema:
    """Load the schema of the model `module:Model`. Raises ConfigError if it cannot be imported, or is not such a
    model."""
    model = own_code.find("data.schema", name)
    if not (isinstance(model, type) and issubclass(model, pa.DataFrameModel)):
        raise ConfigError(f"data.schema = {name!r} is not a pandera.polars.DataFrameModel")
    try:
        schema = model.to_schema()
    except Exception as error:  # pandera raises errors of many kinds
        raise ConfigError(f"data.schema = {name!r} is not a valid schema: {error}") from error
    _check_it_only_looks(f"data.schema = {name!r}", schema)
    return schema


def read_schema(path: Path) -> pa.DataFrameSchema:
    """Read the schema in a YAML file. Raises ConfigError if there is none."""
    if not is_file(path):
        raise ConfigError(f"{path}: cannot be read: no such file")
    try:
        schema = pa.DataFrameSchema.from_yaml(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except Exception as error:
        raise ConfigError(f"{path}: not a schema as `grpo data schema` writes it: {error}") from error
    _check_it_only_looks(str(path), schema)
    return schema


def _check_it_only_looks(name: str, schema: pa.DataFrameSchema) -> None:
    """Raises ConfigError if the schema would change the data it checks, since the training reads it unchanged, or would
    not find every row that breaks a rule."""
    if wrong := [*_frame_settings(schema), *_column_settings(schema), *_check_settings(schema)]:
        raise ConfigError("\n".join(f"{name}: {it}" for it in wrong))


def _frame_settings(schema: Any) -> Iterator[str]:
    if schema.coerce:
        yield f"coerce changes types, {CHANGES}; write the types that the columns have"
    if schema.add_missing_columns:
        yield f"add_missing_columns adds columns, {CHANGES}; add them by data.columns"
    if schema.drop_invalid_rows:
        yield "drop_invalid_rows hides the rows that break a rule; set data.checks.own_schema to 'drop' instead"
    if schema.strict == "filter":
        yield f"strict = 'filter' leaves columns out, {CHANGES}; set it to true or false"
    if schema.dtype is not None:
        yield "pandera does not check a dtype for all columns; give each column its type"


def _column_settings(schema: pa.DataFrameSchema) -> Iterator[str]:
    for name, column in schema.columns.items():
        if column.coerce and not schema.coerce:
            yield f"column {name!r}: coerce changes its type, {CHANGES}; write the type that it has"
        if column.default is not None:
            yield f"column {name!r}: a default fills it, {CHANGES}; fill it by data.columns"
        if column.drop_invalid_rows:
            yield f"column {name!r}: drop_invalid_rows hides rows; set data.checks.own_schema to 'drop' instead"
        if column.unique and column.regex:
            yield f"column {name!r}: unique is not checked for columns that a pattern names; name each column"


def _check_settings(schema: Any) -> Iterator[str]:
    found = [("", check) for check in schema.checks]
    found += [(f"column {name!r}: ", check) for name, column in schema.columns.items() for check in column.checks]
    for where, check in found:
        if check.groupby is not None:
            yield f"{where}check {check.name}: pandera does not support groupby for polars; compare rows in another way"
        if check.raise_warning:
            yield f"{where}check {check.name}: raise_warning hides rows; set data.checks.own_schema to 'warn' instead"
        if check.n_failure_cases is not None:
            yield f"{where}check {check.name}: n_failure_cases hides the rows after the first; leave it out"


def hold_against(parts: Mapping[str, Rows], schema: pa.DataFrameSchema) -> tuple[list[str], pl.DataFrame]:
    """Return the problems of the parts' columns, in sentences, and every row that breaks a rule (FINDING), in the order
    of the rows. Each check of the schema sees a slice of the rows; `unique` covers all of them."""
    problems, findings = [], [NONE]
    for name, rows in parts.items():
        cases = [_cases(frame, _without_unique(schema), first) for first, frame in rows.numbered()]
        cases += [_repeated(rows, schema)]
        found = pl.concat([_NO_CASE, *cases], how="diagonal_relaxed")
        problems += [
            f"{name} breaks {schema.name or 'the contract'}: {_problem(case, rows)}"
            for case in found.filter(pl.col("index").is_null()).unique(maintain_order=True).iter_rows(named=True)
        ]
        value = pl.format("{} breaks {}", shown(pl.col("failure_case").fill_null("null")), "check")
        findings.append(
            found.drop_nulls("index")
            .select(
                dataset=pl.lit(name),
                row=pl.col("index").cast(pl.UInt32),
                column=pl.col("column").fill_null(""),
                check=pl.lit(RULE),
                value=value,
                other=pl.lit(None, pl.String),
            )
            .sort("row", maintain_order=True)
        )
    return problems, pl.concat(findings)


def _cases(frame: pl.DataFrame, schema: pa.DataFrameSchema, first: int = 0) -> pl.DataFrame:
    """Pandera's findings in the rows. `first`: number of the first row."""
    try:
        schema.validate(frame, lazy=True)
    except pa.errors.SchemaErrors as errors:
        return errors.failure_cases.select(*_NO_CASE.columns).with_columns(pl.col("index").cast(pl.Int64) + first)
    return _NO_CASE


def _without_unique(schema: pa.DataFrameSchema) -> pa.DataFrameSchema:
    schema = copy.deepcopy(schema)
    schema.unique = None
    for column in schema.columns.values():
        column.unique = False
    return schema


def _repeated(rows: Rows, schema: pa.DataFrameSchema) -> pl.DataFrame:
    """Pandera's findings by the rules `unique`, among the rows with values that another row has too."""
    asked = [[name] for name, column in schema.columns.items() if column.unique]
    asked += [list(schema.unique)] if schema.unique else []
    asked = [names for names in asked if {*names} <= {*rows.columns}]
    if not asked:
        return _NO_CASE
    keys = pl.concat(
        frame.select(key_of(pl.struct(names)).alias(str(place)) for place, names in enumerate(asked))
        for frame in rows.slices()
    )
    again = keys.select(pl.any_horizontal(pl.all().is_duplicated())).to_series().arg_true()
    rules = pa.DataFrameSchema(
        {name: pa.Column(unique=True, nullable=True) for name, column in schema.columns.items() if column.unique},
        unique=schema.unique,
        report_duplicates=schema.report_duplicates,
        name=schema.name,
    )
    # pandera writes whole rows into its findings, and fails at numbers beyond 64 bits in other columns.
    cases = _cases(rows.gather(again).select(*dict.fromkeys(itertools.chain(*asked))), rules)
    return cases.with_columns(index=again.cast(pl.Int64).gather(cases["index"]))


def _problem(case: Mapping[str, str], rows: Rows) -> str:
    if case["check"] == "column_in_dataframe":
        return f"it has no column {case['failure_case']!r}; its columns are {', '.join(rows.columns)}"
    if case["check"].startswith("dtype"):
        return f"column {case['column']!r} is of type {case['failure_case']}, not {case['check'][7:-2]}"
    return f"{case['column']}: {case['failure_case']} breaks {case['check']}"
