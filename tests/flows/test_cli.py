"""The command line as a whole: what it imports, and what it says without being given a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from tests.conftest import config_values, make_run

pytestmark = pytest.mark.served

ROOT = Path(__file__).parents[2]
HEAVY = {
    "torch",
    "transformers",
    "vllm",
    "prefect",
    "mlflow",
    "pandera",
    "pandas",
    "scipy",
    "polars",
    "numpy",
    "jinja2",
}


def test_commands_that_only_answer_import_no_heavy_library(tmp_path: Path) -> None:
    commands = ["--help", "plan --num-prompts 64 --num-generations 8", "status", "keys", "up --help"]
    code = (
        "import sys; from flows.cli.main import app\n"
        f"for command in {commands}:\n"
        "  try: app(command.split())\n"
        "  except SystemExit as end: assert not end.code, (command, end.code)\n"
        f"  loaded = {HEAVY!r} & set(sys.modules)\n"
        "  assert not loaded, (command, loaded)"
    )
    environment = {**os.environ, "GRPO_STORAGE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_starting_a_pipeline_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, flows.pipeline; assert not {'torch', 'transformers'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_command_finds_its_server_before_prefect_reads_which_one_is_meant() -> None:
    """Prefect reads its settings when it is imported: a server that is named later is not used."""
    code = (
        "import contextlib, sys\n"
        "from flows.cli.main import app\n"
        "from flows.serving import find_server\n"
        "from tasks.registry import champion\n"
        "import flows.parameters.early_refusals as early\n"
        "champion.check = early.refuse_early = lambda *arguments: None\n"
        "def find():\n"
        "    print('prefect' in sys.modules)\n"
        "    raise InterruptedError\n"
        "find_server._named_api = find\n"
        "for words in ('promote', 'sums'), ('rollback', 'sums'), ('run', 'configs/quickstart.toml'):\n"
        "    with contextlib.suppress(InterruptedError):\n"
        "        app(words, standalone_mode=False)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, 3 * "False\n"), done.stderr


def test_the_version_is_known() -> None:
    assert CliRunner().invoke(app, ["--version"]).output.startswith("grpo-flows 0.")


@pytest.mark.parametrize("command", ["promote", "rollback"])
def test_a_command_without_its_argument_says_what_to_give(command: str) -> None:
    done = CliRunner().invoke(app, [command])
    assert done.exit_code == 2
    assert "Missing argument 'model'. Name of a registered model, or of a run that registered one" in done.stderr


def test_status_without_a_name_lists_the_runs_and_how_far_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    none = CliRunner().invoke(app, ["status"])
    assert (none.exit_code, "no runs in" in none.output) == (0, True)
    values = config_values(tmp_path / "model", tmp_path)
    for name in ("begun", "evaluated"):
        make_run(tmp_path / "runs" / name, {**values, "name": name})
    difference = {"mean": 0.25, "low": 0.125, "high": 0.375}
    sets = {"held-out": {"differences": {"base": {"accuracy": difference}}}}
    report = {"deciding_metric": "accuracy", "sets": sets}
    (tmp_path / "runs" / "evaluated" / "evaluation").mkdir()
    (tmp_path / "runs" / "evaluated" / "evaluation" / "report.json").write_text(json.dumps(report))
    os.utime(tmp_path / "runs" / "begun" / "plan.json", (0, 0))
    listed = CliRunner().invoke(app, ["status"])
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in listed.output.splitlines() if "│" in line]
    assert [(name, done, figure) for name, done, _, figure in rows] == [
        ("evaluated", "plan, evaluate", "accuracy +25.0 points [12.5, 37.5]"),
        ("begun", "plan", ""),
    ]
    assert rows[1][2].startswith("1970-01-01")
