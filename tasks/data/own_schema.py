"""Rules of your own about the columns that data sets have: `data.schema`, or a contract written as YAML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandera.polars as pa
import polars as pl

from grpo_core.data import own_code
from grpo_core.errors import ConfigError
from tasks.data.repeats import NONE, shown

RULE = "own_schema"


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
    try:
        return pa.DataFrameSchema.from_yaml(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except Exception as error:
        raise ConfigError(f"{path}: no schema as `grpo data schema` writes it: {error}") from error


def hold_against(frames: Mapping[str, pl.DataFrame], schema: pa.DataFrameSchema) -> tuple[list[str], pl.DataFrame]:
    """What is wrong with the columns of the frames, in sentences, and every row that breaks a rule (FINDING)."""
    problems, findings = [], [NONE]
    for name, frame in frames.items():
        try:
            schema.validate(frame, lazy=True)
        except pa.errors.SchemaErrors as errors:
            cases = errors.failure_cases
        else:
            continue
        problems += [
            f"{name} breaks {schema.name or 'the contract'}: {_problem(case, frame)}"
            for case in cases.filter(pl.col("index").is_null()).iter_rows(named=True)
        ]
        value = pl.format("{} breaks {}", shown(pl.col("failure_case").fill_null("null")), "check")
        findings.append(
            cases.drop_nulls("index").select(
                dataset=pl.lit(name),
                row=pl.col("index").cast(pl.UInt32),
                column=pl.col("column").fill_null(""),
                check=pl.lit(RULE),
                value=value,
            )
        )
    return problems, pl.concat(findings)


def _problem(case: Mapping[str, str], frame: pl.DataFrame) -> str:
    if case["check"] == "column_in_dataframe":
        return f"it has no column {case['failure_case']!r}; its columns are {', '.join(frame.columns)}"
    if case["check"].startswith("dtype"):
        return f"column {case['column']!r} is of type {case['failure_case']}, not {case['check'][7:-2]}"
    return f"{case['column']}: {case['failure_case']} breaks {case['check']}"
