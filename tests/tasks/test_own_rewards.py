"""A reward of one's own: a file beside the configuration or in the working folder, found by every command and stage."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from flows.cli.main import app
from grpo_core.config.files import load_config
from grpo_core.errors import RewardError
from grpo_core.rewards.contract import resolve
from tasks.stages.lineage import lineage_keys
from tasks.stages.run_directory import kept_rewards, open_run
from tests.conftest import write_config

pytestmark = pytest.mark.served

GRPO = Path(sys.executable).with_name("grpo")  # as a person calls it: without the working folder on the path
SHORTER = "def shorter(completions):\n    return [-float(len(text)) for text in completions]\n"


def _project(folder: Path, module: str, source: str, function: str = "shorter") -> Path:
    """A configuration in `folder`, with its data and the module of its reward beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{module}.py").write_text(source)
    return write_config(folder, changes={"rewards": [{"function": f"{module}:{function}"}]})


def _grpo(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    return subprocess.run([GRPO, *arguments], capture_output=True, text=True, cwd=folder, env=environment)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`grpo plan` in this process, elsewhere than in the configuration's folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir("/")
    return lambda *arguments: CliRunner().invoke(app, ["plan", *arguments])


def test_a_reward_beside_the_configuration_or_in_the_working_folder_is_found(tmp_path: Path) -> None:
    config = _project(tmp_path / "configs", "beside_mine", SHORTER)
    (tmp_path / "in_folder.py").write_text(SHORTER)
    rewards = "[{function = 'beside_mine:shorter', name = 'beside'}, {function = 'in_folder:shorter', name = 'in'}]"
    given = (str(config), "--set", f"rewards={rewards}", "--completion", "abcd")
    done = _grpo("rewards", "try", *given, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"│ beside +│ -4 ", done.stdout) and re.search(r"│ in +│ -4 ", done.stdout), done.stdout


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("planned:shortr", "planned.py does not define 'shortr'"),
        ("plannd:shorter", "there is no module 'plannd'; put plannd.py into the working folder or beside the "),
        ("json.plannd:shorter", "there is no module 'json.plannd'"),
        ("broken:shorter", "SyntaxError"),
        ("shorter", "no built-in reward is called 'shorter'"),
        ("./planned.py:shorter", "names a file; write 'planned:shorter'"),
    ],
)
def test_a_plan_refuses_a_reward_that_cannot_be_imported(
    plan: Callable[..., Result], tmp_path: Path, function: str, message: str
) -> None:
    config = _project(tmp_path, "planned", SHORTER, function="shorter")
    (tmp_path / "broken.py").write_text("def shorter(:\n")
    done = plan(str(config), "--json", "--set", f"rewards.0.function={function}")
    assert done.exit_code == 2
    [error] = json.loads(done.stdout)["errors"]
    assert message in error
    assert "there is no module" not in message or str(tmp_path) in error  # searched


@pytest.mark.parametrize(
    "source",
    [
        SHORTER,
        "from json import *\n",
        "if True:\n    import math as shorter\n",
        "class Shorter:\n    def __call__(self, completions): ...\nshorter = Shorter()\n",
        "def __getattr__(name): ...\n",
    ],
)
def test_a_plan_for_another_machine_does_not_run_the_module_of_a_reward(
    plan: Callable[..., Result], tmp_path: Path, source: str
) -> None:
    config = _project(tmp_path, "slow_to_import", f"{source}raise SystemExit('was run')\n")
    done = plan(str(config), "--gpu", "")
    assert done.exit_code == 0, done.output
    assert "planned for another machine: slow_to_import read here, not imported" in " ".join(done.output.split())


def test_a_file_beside_the_configuration_hides_no_installed_module(tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text(SHORTER)
    config = load_config(_project(tmp_path, "unused", SHORTER), ["rewards.0.function=colorsys:shorter"])
    with pytest.raises(RewardError, match=r"python3\.\d+/colorsys\.py does not define 'shorter'"):
        resolve(config.rewards[0])


def test_a_file_of_the_working_folder_hides_no_module_from_the_processes_of_rewards(tmp_path: Path) -> None:
    config = _project(tmp_path, "alone", SHORTER)
    for module in ("json", "random"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('it was imported')\n")
    rewards = '[{function = "alone:shorter", isolated = true}, {function = "math_answer"}]'
    given = ("--set", f"rewards={rewards}", "--completion", "4")
    done = _grpo("rewards", "try", str(config), *given, folder=tmp_path)
    assert done.returncode == 0 and "it was imported" not in done.stdout + done.stderr, done.stdout + done.stderr


def test_files_that_a_configuration_does_not_name_are_not_run_by_libraries(tmp_path: Path, model_folder: Path) -> None:
    """They have the names of packages that libraries of this project look for and that are not installed."""
    config = _project(tmp_path / "configs", "judged", SHORTER)
    for folder in (config.parent, tmp_path):
        for name in ("trio", "zstandard", "snappy", "lz4", "brotli", "brotlicffi", "numexpr", "bottleneck", "pyspark"):
            (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write(__file__ + '\\n')\n")
    for command, *given in (("data", "check"), ("rewards", "try", "--completion", "4")):
        given += [str(config), "--set", f"model.name_or_path={model_folder}"]
        done = _grpo(command, *given, folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


def test_a_module_that_a_reward_imports_in_vain_is_named(tmp_path: Path) -> None:
    config = load_config(_project(tmp_path, "needs_helper", f"import helper_of_mine\n{SHORTER}"))
    with pytest.raises(RewardError, match="it imports 'helper_of_mine', which is not there"):
        resolve(config.rewards[0])


def test_a_run_keeps_its_rewards_and_its_stages_find_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another working folder, where the configuration's own is not searched, as on another machine."""
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path / "storage"))
    folder = tmp_path / "project"
    (folder / "house").mkdir(parents=True)
    (folder / "house" / "tone.py").write_text("from house.kind import polite\n")
    (folder / "house" / "kind.py").write_text("def polite(completions): return [1.0 for _ in completions]\n")
    (folder / "house" / "score.py").write_text("def compute_score(solution_str): return {'score': 2.0}\n")
    path = _project(folder, "kept_reward", SHORTER)
    both = 'rewards=[{function="kept_reward:shorter"}, {function="house.tone:polite"}, '
    both += '{function="verl:house.score:compute_score"}]'
    with open_run(load_config(path, [both])) as run:
        keys = lineage_keys(load_config(run / "config.toml"))
    assert kept_rewards(run) == {
        "kept_reward.py": run / "rewards" / "kept_reward.py",
        "house/tone.py": run / "rewards" / "house" / "tone.py",
        "house/kind.py": run / "rewards" / "house" / "kind.py",  # in which the function is defined
        "house/score.py": run / "rewards" / "house" / "score.py",
    }
    (folder / "kept_reward.py").unlink()
    code = (
        "import sys; from pathlib import Path; from grpo_core.config.files import load_config\n"
        "from tasks.stages.lineage import lineage_keys; from grpo_core.rewards.contract import resolve; import json\n"
        "config = load_config(Path(sys.argv[1])); rewards = [resolve(it) for it in config.rewards]\n"
        "print(json.dumps([[it.function(['abc']) for it in rewards], lineage_keys(config)]))"
    )
    command = [sys.executable, "-c", code, str(run / "config.toml")]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=True)
    assert json.loads(done.stdout) == [[[-3.0], [1.0], [2.0]], keys]


def test_a_run_keeps_what_its_rewards_are_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path / "storage"))
    path = _project(tmp_path, "edited_reward", SHORTER)
    with open_run(load_config(path)):
        pass
    (tmp_path / "edited_reward.py").write_text(SHORTER + "# another\n")
    with open_run(load_config(path)) as run:
        assert (run / "rewards" / "edited_reward.py").read_text() == SHORTER + "# another\n"
    with open_run(load_config(path, ["rewards=[{function='numeric_match'}]"])) as run:
        assert not (run / "rewards").exists()
