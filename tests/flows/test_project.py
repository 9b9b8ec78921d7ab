"""`grpo init`: a folder that a recipe runs in as it stands, from a checkout and from an installed package."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.init import RECIPES, write_project
from flows.cli.main import app
from grpo_core.config.files import load_config
from grpo_core.errors import ConfigError
from tests.command_line import grpo_commands
from tests.packing import copy_of_the_source

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"^(?:python -m (examples\.\w+\.\w+)|grpo run (configs/\w+\.toml))", re.MULTILINE)


def test_every_recipe_has_a_configuration_a_script_and_a_page() -> None:
    # Of the quickstart, of docs/how-to/mixed-data.md and of docs/how-to/first-gpu-run.md.
    of_other_pages = {"arithmetic", "quickstart", "mixed", "gsm8k", "gsm8k-2-gpus"}
    made = {path.parent.name for path in ROOT.glob("examples/*/make.py")} - of_other_pages
    configured = {path.stem for path in ROOT.glob("configs/*.toml")} - of_other_pages
    assert set(RECIPES) == made == configured
    listed = (ROOT / "docs" / "tutorials" / "recipes" / "README.md").read_text()
    assert [recipe for recipe in RECIPES if f"]({recipe}.md)" not in listed] == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_project_holds_what_its_page_names_and_the_configuration_of_the_recipe(recipe: str, tmp_path: Path) -> None:
    project = write_project("mine", recipe, tmp_path)
    page = (project / "README.md").read_text()
    named = COMMAND.findall(page)
    assert (f"examples.{recipe}.make", "") in named and ("", f"configs/{recipe}.toml") in named
    for module, config in named:
        assert (project / (config or module.replace(".", "/") + ".py")).is_file()
    assert "](" not in page and "Next:" not in page
    assert [command for command in grpo_commands(page) if recipe in command] == [], "the run is called mine"
    ours = load_config(ROOT / "configs" / f"{recipe}.toml")
    theirs = project / "configs" / f"{recipe}.toml"
    assert load_config(theirs) == ours.model_copy(update={"name": "mine"})
    assert "docs/" not in theirs.read_text()


@pytest.mark.slow
def test_what_has_to_run_beside_a_run_is_said_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = {recipe: CliRunner().invoke(app, ["init", recipe, "--recipe", recipe]).output for recipe in RECIPES}
    _, make, judge, run, *_ = said.pop("writing").splitlines()
    assert make.startswith("python -m examples.writing.make") and run == "grpo run configs/writing.toml"
    assert judge == "# start the judge, as README.md says, and leave it running"
    assert "vllm.entrypoints" in Path("writing", "README.md").read_text()
    assert [recipe for recipe, text in said.items() if "judge" in text] == []


@pytest.mark.parametrize(
    ("name", "recipe", "message"),
    [
        ("mine", "math", "did you mean 'maths'?"),
        ("mine", "x", "recipes: "),
        ("../mine", "maths", "name = '../mine'"),
        ("taken", "maths", "taken exists already"),
    ],
)
def test_what_cannot_be_made_is_refused_and_nothing_is_left(
    name: str, recipe: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match=re.escape(message)):
        write_project(name, recipe, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.slow
def test_an_installed_package_has_the_recipes_with_it(tmp_path: Path) -> None:
    source = copy_of_the_source(tmp_path / "source")
    build = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    work = tmp_path / "work"
    work.mkdir()
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from flows.cli.main import app; app()"
    command = [sys.executable, "-I", "-c", code, str(tmp_path / "site"), "init", "mine", "--recipe", "maths"]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "python -m examples.maths.make" in done.stdout
    config = tomllib.loads((work / "mine" / "configs" / "maths.toml").read_text())
    assert config["name"] == "mine"
    assert (work / "mine" / "examples" / "tiny.py").is_file()
