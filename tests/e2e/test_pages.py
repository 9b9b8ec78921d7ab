"""Pages, command by command and cell by cell as a newcomer copies them: the first run, environments, notebooks, and
those around the quickstart in the order in which they are read: runs, their comparison, their rollouts, a promotion,
and the use of the champion."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx2
import nbformat
import pytest
from mlflow import MlflowClient
from nbclient import NotebookClient

from grpo_core.system.tables import read_parquet
from tests.command_line import fenced
from tests.conftest import make_sums
from tests.e2e.commands import SECONDS, run
from tests.readme import ENVIRONMENTS, FIRST_RUN, ROOT, commands_of, write_files
from tests.serving import free_ports, served_model

PROGRAMS = {"python": sys.executable, "grpo": str(Path(sys.executable).with_name("grpo"))}

pytestmark = pytest.mark.e2e


def test_the_first_run_ends_with_a_champion(tmp_path: Path) -> None:
    make_sums(tmp_path)
    write_files(FIRST_RUN, tmp_path)
    said = ""
    for program, *arguments in commands_of(FIRST_RUN):
        if program != "export":
            said = _do(tmp_path, program, *arguments)
    assert "mine version 1: promoted: reward on held-out" in " ".join(said.split())
    runs = tmp_path / "storage" / "runs"
    for name in ("mine", "faster"):
        report = json.loads((runs / name / "evaluation" / "report.json").read_text())
        assert report["deciding_metric"] == "reward"
        assert report["sets"]["held-out"]["differences"]["base"]["reward"]["low"] > 0
        assert (runs / name / "rewards" / "my_rewards.py").read_text() == (tmp_path / "my_rewards.py").read_text()
    again = _do(tmp_path, "grpo", "promote", "mine")
    assert "mine version 1: unchanged: version 1 is the champion already" in " ".join(again.split())
    assert not (tmp_path / "mlflow.db").exists()
    (tmp_path / "my_rewards.py").unlink()
    _do(tmp_path, "grpo", "status", "mine")  # up to date by the copy that the run keeps


def test_the_page_of_environments_ends_with_a_policy_that_uses_its_tool(tmp_path: Path) -> None:
    _, init, (_, name), make, *rest = commands_of(ENVIRONMENTS)
    _do(tmp_path, *init)
    folder = tmp_path / name
    write_files(ENVIRONMENTS, folder)
    for program, *arguments in (make, *rest):
        _do(folder, program, *arguments)
    report = json.loads((folder / "storage" / "runs" / "mine" / "evaluation" / "report.json").read_text())
    assert report["sets"]["held-out"]["differences"]["base"]["reward"]["low"] > 0


def _do(folder: Path, program: str, *arguments: str) -> str:
    return run([PROGRAMS[program], *arguments], folder, _inherited())


def _inherited() -> dict[str, str]:
    left_out = ("PREFECT_", "MLFLOW_", "PYTHONPATH", "PYTHONSAFEPATH", "GRPO_")
    return {key: value for key, value in os.environ.items() if not key.startswith(left_out)}


PAGES = [
    ROOT / "docs" / name
    for name in (
        "tutorials/quickstart.md",
        "how-to/run.md",
        "how-to/compare.md",
        "how-to/recover.md",
        "how-to/rollouts.md",
        "how-to/promote.md",
        "how-to/use.md",
        "how-to/serve.md",
    )
]
# Left out: servers and what asks them, answers to a question that is not open, versions that may be the same one.
LEFT_OUT = {"up", "schedule", "--approve", "--reject", "arithmetic@champion", "serve", "serve-model"}
MAY_REFUSE = {"promote"}  # whether a version is better is not known beforehand
LEAST = 20


def test_the_pages_around_the_quickstart_can_be_followed_in_their_order(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    environment = _inherited()
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    database = f"sqlite:///{tmp_path}/storage/mlflow/mlflow.db"

    def do(*words: str) -> str:
        tracked = environment | ({"MLFLOW_TRACKING_URI": database} if words[0] == "mlflow" else {})
        done = subprocess.run(words, cwd=tmp_path, env=tracked, capture_output=True, text=True, timeout=SECONDS)
        allowed = {0, 1} if len(words) > 1 and words[1] in MAY_REFUSE else {0}
        assert done.returncode in allowed, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
        return done.stdout

    make_sums(tmp_path)
    do("grpo", "run", "configs/quickstart.toml")  # what `make quickstart` does
    followed = [words for page in PAGES for words in commands_of(page) if words[0] in ("grpo", "mlflow")]
    followed = [words for words in followed if not LEFT_OUT & {*words}]
    assert len(followed) > LEAST
    for words in followed:
        if words[1] == "rollback":  # whatever the gate thought of the versions before, there is one to return to
            do("grpo", "promote", "arithmetic", "--version", "1", "--force")
            do("grpo", "promote", "arithmetic", "--version", "2", "--force")
        do(*words)
        if words[1:3] == ["promote", "arithmetic"] and "--force" in words:
            promoted = do("grpo", "promote", "arithmetic")
            assert "champion already" in " ".join(promoted.split())
    code, _of_conversations = fenced((ROOT / "docs" / "how-to" / "use.md").read_text(), "python")
    assert re.search(r"^\['\d*', '\d*'\]\n\['\d'\]$", do("python", "-c", code), re.MULTILINE)
    assert (tmp_path / "champion" / "model" / "config.json").is_file()
    [serve] = [words for words in commands_of(PAGES[-1]) if words[:3] == ["mlflow", "models", "serve"]]
    [asked] = [
        json.loads(words[words.index("-d") + 1]) for words in commands_of(PAGES[-1]) if "/invocations" in words[1]
    ]
    [port] = free_ports(1)
    serve[serve.index("--port") + 1] = str(port)
    tracked = environment | {"MLFLOW_TRACKING_URI": database}
    with served_model(serve, port, tmp_path / "log", "/ping", cwd=tmp_path, env=tracked) as url:
        found = httpx2.post(f"{url}/invocations", json=asked, timeout=SECONDS).raise_for_status().json()
        run = MlflowClient(database).get_model_version_by_alias("arithmetic", "champion").tags["run"]
        samples = read_parquet(tmp_path / "storage" / "runs" / run / "evaluation" / "samples.parquet").head(100)
        asking = {"inputs": samples["prompt"].to_list()}
        answers = httpx2.post(f"{url}/invocations", json=asking, timeout=SECONDS).raise_for_status().json()
    assert re.fullmatch(r"\d+", found["predictions"][0])
    assert answers["predictions"] == samples["trained/completion"].to_list()


PAGE = ROOT / "docs" / "how-to" / "notebook.md"


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
