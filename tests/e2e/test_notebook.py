"""The page of notebooks: its shell commands, then its cells in a real Jupyter kernel, in their order."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.command_line import fenced
from tests.e2e.commands import SECONDS, run
from tests.packing import ROOT
from tests.readme import commands_of

PAGE = ROOT / "docs" / "how-to" / "notebook.md"

pytestmark = pytest.mark.e2e


def test_the_cells_of_the_page_train_with_their_own_reward_and_show_what_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("PREFECT_", "MLFLOW_", "GRPO_", "PYTHON"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # as the page's shell has it
    installing, init, (_, name), make, starting = commands_of(PAGE)
    assert installing[:2] == ["pip", "install"] and starting == ["jupyter", "lab"]
    run(init, tmp_path, os.environ)
    run(make, tmp_path / name, os.environ)
    cells = [nbformat.v4.new_code_cell(block) for block in fenced(PAGE.read_text(), "python")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    patience = {"timeout": SECONDS, "startup_timeout": SECONDS}
    NotebookClient(notebook, **patience, resources={"metadata": {"path": str(tmp_path / name)}}).execute()

    *_, tried, ran, curve, samples, report = ["".join(map(_shown, cell.outputs)) for cell in cells]
    assert "what now?" in tried
    assert "better than the base by" in ran and "registered  mine version 1" in ran
    assert "image/png" in curve
    assert "trained/completion" in samples
    assert "Better than the base by" in report


def _shown(output: nbformat.NotebookNode) -> str:
    """What a cell's output shows: text, HTML, and the name of every other kind."""
    data = output.get("data", {})
    return output.get("text", "") + "".join((data.get("text/html", ""), *data))
