"""Rules of your own, beside the ones that always hold; the contract as a file; data checked alone."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w
from typer.testing import CliRunner

from flows.cli.main import app
from grpo_core.config.files import parse_config
from grpo_core.errors import ConfigError
from tasks.data.own_schema import hold_against, load_schema
from tasks.data.rows import of_frame
from tasks.stages.lineage import lineage_keys
from tests.conftest import config_values
from tests.rows import screen, write_lines

MODULE = """
import pandera.polars as pa
import polars as pl


class Graded(pa.DataFrameModel):
    question: str = pa.Field(str_length={"min_value": 4})
    level: int = pa.Field(ge=1, le=5, nullable=True)

    @pa.check("question")
    def asks(cls, data):
        return data.lazyframe.select(pl.col(data.key).str.ends_with("="))


class Pair:
    pass


def graded(completions, answer: list[str], points: list[float], note: list[str | None]):
    return [0.0 for _ in completions]
"""
ODD = """
import pandera.polars as pa
import polars as pl

class Graded(pa.DataFrameModel):
    level: int = pa.Field({level})

    class Config:
        {settings}
"""


@pytest.fixture
def values(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A configuration of data with columns of their own, and the module of its schema beside it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_rules", raising=False)
    (tmp_path / "own_rules.py").write_text(MODULE)
    for name, first, last in (("train", 10, 20), ("eval", 30, 35)):
        rows = [{"question": f"{n}+1=", "answer": str(n + 1), "level": n % 5 + 1} for n in range(first, last)]
        write_lines(tmp_path / f"{name}.jsonl", rows)
    values = config_values(model_folder, tmp_path)
    values["data"] = {
        "train": str(tmp_path / "train.jsonl"),
        "eval": str(tmp_path / "eval.jsonl"),
        "columns": {"prompt": "question"},
        "schema": "own_rules:Graded",
    }
    return values


def _read(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def _edit(values: dict[str, Any], edit: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Change the rows of the training set, or have others in their place."""
    rows = _read(values["data"]["train"])
    write_lines(Path(values["data"]["train"]), edit(rows) or rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("level", 9, "9 breaks less_than_or_equal_to(5)"),
        ("question", "3=", "3= breaks str_length(4, None)"),
        ("question", "1234", "1234 breaks asks"),
    ],
)
def test_a_row_that_breaks_a_rule_of_ones_own_is_refused_dropped_or_kept(
    values: dict[str, Any], column: str, value: Any, said: str
) -> None:
    _edit(values, lambda rows: rows[3].update({column: value}))
    for severity, refused, kept in (("error", True, 9), ("drop", False, 9), ("warn", False, 10)):
        values["data"]["checks"] = {"own_schema": severity}
        screened = screen(parse_config(values))
        assert screened.findings.rows() == [("train", 3, column, "own_schema", said, None)]
        assert (screened.refused, screened.kept["train"].height) == (refused, kept)


def test_unique_is_of_all_rows_and_a_check_of_each_slice(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_rules.py").write_text(MODULE.replace('"min_value": 4}', '"min_value": 4}, unique=True'))
    _edit(values, lambda rows: [*rows, rows[0]])
    monkeypatch.setattr("tasks.data.rows.SLICE_ROWS", 4)
    found = screen(parse_config(values)).findings.filter(check="own_schema")
    assert found.select("row", "value").rows() == [(row, "10+1= breaks field_uniqueness") for row in (0, 10)]


def test_a_dropped_row_is_no_earlier_occurrence_of_another(values: dict[str, Any]) -> None:
    _edit(values, lambda rows: [rows[0] | {"level": 9}, *rows])
    values["data"]["checks"] = {"own_schema": "drop"}
    assert screen(parse_config(values)).findings["check"].to_list() == ["own_schema"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda row: {key: value for key, value in row.items() if key != "level"},
            "train breaks Graded: it has no column 'level'; its columns are question, answer",
        ),
        (lambda row: row | {"level": "x"}, "train breaks Graded: column 'level' is of type String, not Int64"),
    ],
)
def test_columns_that_the_schema_refuses_are_named(values: dict[str, Any], change: Any, said: str) -> None:
    _edit(values, lambda rows: [change(row) for row in rows])
    assert said in screen(parse_config(values)).shape


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own_rules:Pair", "data.schema = 'own_rules:Pair' is not a pandera.polars.DataFrameModel"),
        ("own_rules:Grade", "own_rules.py does not define 'Grade'"),
        ("Graded", "data.schema: 'Graded' is not of the form module:Model"),
    ],
)
def test_what_is_no_model_is_refused(values: dict[str, Any], name: str, said: str) -> None:
    values["data"]["schema"] = name
    with pytest.raises(ConfigError, match=re.escape(said)):
        screen(parse_config(values))


@pytest.mark.parametrize(
    ("level", "settings", "said"),
    [
        ("", "coerce = True", "coerce changes types"),
        ("", "add_missing_columns = True", "add_missing_columns adds columns"),
        ("", "drop_invalid_rows = True", "set data.checks.own_schema to 'drop'"),
        ("", "strict = 'filter'", "strict = 'filter' leaves columns out"),
        ("", "dtype = pl.String", "give each column its type"),
        ("coerce=True", "", "column 'level': coerce changes its type"),
        ("default=3", "", "column 'level': a default fills it"),
        ("alias='le.*', regex=True, unique=True", "", "column 'le.*': unique is not checked"),
        ("le=5, raise_warning=True", "", "set data.checks.own_schema to 'warn'"),
        ("le=5, n_failure_cases=1", "", "n_failure_cases hides the rows after the first"),
        ("no_such_check=5", "", "custom check 'no_such_check' is not available"),
    ],
)
def test_a_schema_that_would_change_the_rows_or_hide_some_is_refused(
    values: dict[str, Any], tmp_path: Path, level: str, settings: str, said: str
) -> None:
    model = ODD.format(level=level, settings=settings or "pass")
    (tmp_path / "own_rules.py").write_text(model)
    with pytest.raises(ConfigError, match=re.escape(said)):
        screen(parse_config(values))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "settings", "wrong"),
    [
        ("alias='level', le=5", "", [4]),
        ("le=5", "strict = False", [4]),
        ("le=5", "name = 'mine'", [4]),
        ("isin=[1, 2, 3, 4, 5]", "", [4]),
        ("nullable=False, le=8", "", [4, 5]),
        ("le=8, ignore_na=False", "", [4, 5]),
    ],
)
def test_what_a_schema_may_say_is_checked_in_each_row(
    values: dict[str, Any], tmp_path: Path, level: str, settings: str, wrong: list[int]
) -> None:
    """Of the rows, the fifth has level 9 and the sixth has none."""
    _edit(values, lambda rows: [row | {4: {"level": 9}, 5: {"level": None}}.get(n, {}) for n, row in enumerate(rows)])
    is_nullable = "" if "nullable" in level else "nullable=True, "
    (tmp_path / "own_rules.py").write_text(ODD.format(level=is_nullable + level, settings=settings or "pass"))
    assert screen(parse_config(values)).findings.filter(check="own_schema")["row"].to_list() == wrong


def test_lineage_follows_the_schema_and_its_source(values: dict[str, Any], tmp_path: Path) -> None:
    def key() -> str:
        return lineage_keys(parse_config(values))["validate"]

    keys = [key()]
    (tmp_path / "own_rules.py").write_text(MODULE.replace("le=5", "le=6"))
    keys.append(key())
    del values["data"]["schema"]
    keys.append(key())
    assert len({*keys}) == 3


def _grpo(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["data", *map(str, arguments)])
    return done.exit_code, done.output


@pytest.fixture
def config(values: dict[str, Any], tmp_path: Path) -> Path:
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(values))
    return tmp_path / "mine.toml"


@pytest.mark.slow
def test_a_runs_data_are_checked_alone(config: Path, tmp_path: Path) -> None:
    assert _grpo("check", config) == (
        0,
        "train: 10 of 10 rows keep the contract\neval: 5 of 5 rows keep the contract\n",
    )
    status, said = _grpo("check", config, "--set", "data.columns={}")
    assert status == 2 and "train has no column 'prompt'; its columns are question, answer, level: set " in said
    rows = _read(str(tmp_path / "train.jsonl"))
    write_lines(tmp_path / "train.jsonl", [*rows, rows[0], rows[1] | {"level": 0}])
    status, said = _grpo("check", config)
    assert status == 2 and "train row 11, level: '0 breaks greater_than_or_equal_to(1)' breaks own_schema" in said
    status, said = _grpo("check", config, "--set", "data.checks.own_schema=drop")
    assert status == 0 and "train: 1 rows break own_schema (keeps the rules of data.schema); they are left out" in said
    assert "train: 11 of 12 rows keep the contract" in said
    assert not (tmp_path / "storage").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"question": ""}, "str_length(4, None)"),
        ({"question": None}, "not_nullable"),
        ({"answer": " "}, "str_contains"),
        ({"answer": None}, "not_nullable"),
        ({"level": 9}, "less_than_or_equal_to(5)"),
        ({"points": None}, "not_nullable"),
        ({"note": None}, ""),
    ],
    ids=str,
)
def test_the_written_contract_refuses_what_the_run_would(
    values: dict[str, Any], tmp_path: Path, change: dict[str, Any], rule: str
) -> None:
    """Read from its file alone: without configuration, model and module."""
    values["rewards"] = [{"function": "own_rules:graded"}]
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(values))
    status, written = _grpo("schema", tmp_path / "mine.toml")
    assert status == 0 and "# own_rules:Graded also checks asks" in written
    contract, data = tmp_path / "contract.yaml", tmp_path / "more.jsonl"
    contract.write_text(written)
    rows = [
        {"question": f"{n}+1=", "answer": str(n + 1), "level": 1, "points": 0.5, "note": "n"} for n in range(40, 50)
    ]
    write_lines(data, rows)
    assert _grpo("check", data, "--schema", contract) == (0, f"10 rows keep {contract}\n")
    write_lines(data, [*rows[:4], rows[4] | change, *rows[5:]])
    status, said = _grpo("check", data, "--schema", contract)
    (name,) = change
    assert status == (2 if rule else 0)
    assert not rule or (f"row 4, column {name!r}: " in said and rule in said), said
    values["data"]["train"] = str(data)
    write_lines(tmp_path / "eval.jsonl", [row | {"question": f"9{row['question']}"} for row in rows])
    assert screen(parse_config(values)).refused == bool(rule)


def test_the_contract_says_what_a_function_and_a_template_read(values: dict[str, Any], tmp_path: Path) -> None:
    del values["data"]["schema"]
    values["data"]["columns"] = {"prompt": "Level {level}: {question}", "answer": "own_rules:graded"}
    values["teacher"] = {"template": "{prompt} as in {solution}"}
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(values))
    status, written = _grpo("schema", tmp_path / "mine.toml")
    assert status == 0 and "# answer is made by own_rules:graded: describe the columns" in written
    assert "  level:\n" in written and "  question:\n" in written and "  answer:\n" not in written
    assert "  solution:\n    description: read by teacher.template" in written


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train.jsonl"], "a data file is checked against a contract: give it by --schema"),
        (["mine.toml", "--schema", "mine.toml"], "--schema is for a data file"),
        (["train.jsonl", "--schema", "mine.toml"], "not a schema as `grpo data schema` writes it"),
        (["train.jsonl", "--schema", "gone.yaml"], "gone.yaml: cannot be read"),
        (["train.jsonl", "--schema", "/dev/zero"], "/dev/zero: cannot be read"),
        (["pipe.jsonl", "--schema", "own.yaml"], "a pipe, a device or a link to nothing, not a file or folder"),
        (["nothing.csv", "--schema", "own.yaml"], "it has no rows"),
        (["twice.parquet", "--schema", "own.yaml"], "the column 'x' appears twice"),
    ],
)
def test_what_cannot_be_checked_is_refused(
    config: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(config.parent)
    os.mkfifo("pipe.jsonl")
    Path("nothing.csv").write_text("question,level\n")
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["x", "x"]), "twice.parquet")
    Path("own.yaml").write_text(_grpo("schema", config)[1])
    status, output = _grpo("check", *arguments)
    assert status == 2 and said in output


def test_all_broken_rules_of_all_data_sets_are_found(values: dict[str, Any]) -> None:
    frame = pl.DataFrame({"question": ["12345", "1+1="], "level": [0, 1]})
    problems, findings = hold_against(
        {"train": of_frame(frame), "eval": of_frame(frame)}, load_schema(values["data"]["schema"])
    )
    assert problems == []
    assert sorted(findings.select("dataset", "row", "column").rows()) == [
        (name, 0, column) for name in ("eval", "train") for column in ("level", "question")
    ]
