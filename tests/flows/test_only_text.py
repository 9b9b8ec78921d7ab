"""What commands print is only text, whatever data, models and people say: no markup, no control characters, no
megabytes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import polars as pl
import pytest
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from typer.testing import CliRunner, Result

from flows.cli.compare import show
from flows.cli.main import app
from flows.cli.terminal import LONGEST, Terminal
from grpo_core.config.files import dump_config, parse_config
from tasks.rendering.page import Section
from tasks.rendering.page import Table as PageTable
from tasks.rendering.visible import visible
from tests.hostile import EVIL, is_seen
from tests.made_up import values_of

OWN = re.compile(r"\x1b\[[0-9;]*m")  # colours
OVERSIZED = 60_000  # characters that no command prints for these inputs: the largest has two million


def _assert_only_text(printed: str) -> None:
    assert len(printed) < OVERSIZED
    assert all(it in "\n\t" or is_seen(it) for it in OWN.sub("", printed))


def _printed(*shown: RenderableType) -> str:
    terminal = Terminal()
    with terminal.capture() as captured:
        terminal.print(*shown)
    return captured.get()


@pytest.mark.parametrize("text", EVIL, ids=range(len(EVIL)))
def test_a_string_is_printed_as_it_is_wherever_it_stands(text: str) -> None:
    table = Table.grid()
    table.add_row(text)
    for shown in (text, Padding(text, 2), table):
        printed = _printed(shown)
        _assert_only_text(printed)
        if len(text) < LONGEST:
            assert "".join(visible(text).split()) in "".join(printed.split())


@pytest.mark.parametrize("text", EVIL[:-1], ids=range(len(EVIL) - 1))
def test_a_section_of_a_comparison_is_only_text(text: str) -> None:
    terminal = Terminal()
    with terminal.capture() as captured:
        show(
            Section(text, text, tables=[PageTable([text, text], [[text, (text, text)]], text)], notes=[text]), terminal
        )
    _assert_only_text(captured.get())


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def _config(tmp_path: Path, **sections: dict[str, object]) -> Path:
    rows = pl.DataFrame({"prompt": [f"{it} {row}" for row, it in enumerate(EVIL)], "answer": EVIL})
    rows.write_parquet(tmp_path / "hostile.parquet")
    data = str(tmp_path / "hostile.parquet")
    values = {**values_of("hostile"), "data": {"train": data, "eval": data}, **sections}
    config = tmp_path / "config.toml"
    config.write_text(dump_config(parse_config(values)))
    return config


@pytest.mark.slow
def test_a_reward_is_tried_on_hostile_rows_and_completions(tmp_path: Path) -> None:
    config = _config(tmp_path, rewards=[{"function": "exact_match"}])
    for row, text in enumerate(EVIL):
        tried = _run("rewards", "try", str(config), "--row", str(row), "--completion", text)
        assert tried.exit_code == 0, tried.output
        _assert_only_text(tried.output)


@pytest.mark.slow
@pytest.mark.parametrize("text", [it for it in EVIL if "\0" not in it], ids=range(len(EVIL) - 1))
def test_refusals_and_plans_show_a_hostile_name_of_a_model_as_text(text: str, tmp_path: Path) -> None:
    config = _config(tmp_path, model={"name_or_path": text})
    for arguments in (("plan", str(config)), ("data", "check", str(config)), ("run", text), ("status", text)):
        printed = _run(*arguments)
        assert printed.exit_code == 2, (arguments, printed.output)
        assert printed.exception is None or isinstance(printed.exception, SystemExit)
        _assert_only_text(printed.output)


def test_a_file_of_hostile_rows_is_checked(tmp_path: Path) -> None:
    rows = pl.DataFrame({text[:200]: [text] for text in EVIL})
    rows.write_parquet(tmp_path / "rows.parquet")
    schema = {"schema_type": "dataframe", "version": "0", "columns": {}, "strict": True}
    schema["columns"] = {
        name: {"dtype": "str", "nullable": False, "checks": {"str_length": {"max_value": 1}}} for name in rows.columns
    }
    (tmp_path / "contract.yaml").write_text(json.dumps(schema))
    checked = _run("data", "check", str(tmp_path / "rows.parquet"), "--schema", str(tmp_path / "contract.yaml"))
    assert checked.exit_code == 2, checked.output
    _assert_only_text(checked.output)
