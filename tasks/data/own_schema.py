"""Rules of your own about the columns that data sets have: `data.schema`, or a contract written as YAML."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import pandera.polars as pa
import polars as pl

from grpo_core.data import own_code
from grpo_core.errors import ConfigError
from tasks.data.places import is_file
from tasks.data.repeats import NONE, key_of, shown
from tasks.data.rows import Rows

RULE = "own_schema"
_NO_CASE = pl.DataFrame(schema={"failure_case": pl.String, "column": pl.String, "check": pl.String, "index": pl.Int64})


def load_schema(name: str) -> pa.DataFrameSchema:
    """The schema of the model `module:Model`. Raises ConfigError if it cannot be imported, or is no such model."""
    model = own_code.find("data.schema", name)
    if not (isinstance(model, type) and issubclass(model, pa.DataFrameModel)):
        raise ConfigError(f"data.schema = {name!r} is no pandera.polars.DataFrameModel")
    try:
        return model.to_schema()
    except Exception as error:  # pandera raises errors of many kinds
        raise ConfigError(f"data.schema = {name!r} is no valid schema: {error}") from error


def read_schema(path: Path) -> pa.DataFrameSchema:
    """The schema in a YAML file. Raises ConfigError if there is none."""
    if not is_file(path):
        raise ConfigError(f"{path}: cannot be read: no such file")
    try:
        return pa.DataFrameSchema.from_yaml(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except Exception as error:
        raise ConfigError(f"{path}: no schema as `grpo data schema` writes it: {error}") from error


def hold_against(parts: Mapping[str, Rows], schema: pa.DataFrameSchema) -> tuple[list[str], pl.DataFrame]:
    """What is wrong with the columns of the parts, in sentences, and every row that breaks a rule (FINDING), in the
    order of the rows. A check of the schema sees a slice of the rows; `unique` is of all of them."""
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
    """What pandera finds in rows from the number `first` on."""
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
    """What pandera finds by the rules `unique`, among the rows that have what another row has."""
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
    cases = _cases(rows.gather(again), rules)
    return cases.with_columns(index=again.cast(pl.Int64).gather(cases["index"]))


def _problem(case: Mapping[str, str], rows: Rows) -> str:
    if case["check"] == "column_in_dataframe":
        return f"it has no column {case['failure_case']!r}; its columns are {', '.join(rows.columns)}"
    if case["check"].startswith("dtype"):
        return f"column {case['column']!r} is of type {case['failure_case']}, not {case['check'][7:-2]}"
    return f"{case['column']}: {case['failure_case']} breaks {case['check']}"
