"""`grpo init`: a project folder to start from, with a recipe's configuration, data scripts and page. `grpo keys`: what
a configuration may hold."""

from __future__ import annotations

import difflib
import re
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.padding import Padding

from flows.cli.terminal import Terminal, say
from grpo_core.config.files import describe_keys, parse_config, read_values
from grpo_core.errors import ConfigError

# Links to configs/, examples/ and docs/tutorials/recipes/; an installed package holds copies.
FILES = Path(__file__).parent / "recipes"
RECIPES = sorted(page.stem for page in (FILES / "docs").glob("*.md") if page.stem != "README")
FIRST_STEPS = {"writing": "start the judge, as README.md says, and leave it running"}
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
EXAMPLE = re.compile(r"python -m examples\.(\w+)\.")
NEXT = re.compile(r"\nNext: .*", re.DOTALL)


def init(
    name: Annotated[str, typer.Argument(help="name of the new folder, and of the run in it")],
    recipe: Annotated[str, typer.Option(help=f"one of {', '.join(RECIPES)}")],
) -> None:
    """Write a project folder to start from: a recipe's configuration, data scripts and page."""
    folder = write_project(name, recipe, Path())
    before = FIRST_STEPS.get(recipe)
    say(
        f"cd {folder}\npython -m examples.{recipe}.make   # data and base model\n"
        + (f"# {before}\n" if before else "")
        + f"grpo run configs/{recipe}.toml\n"
        "README.md says what happens, and what to replace for the real thing."
    )


def write_project(name: str, recipe: str, parent: Path) -> Path:
    """Make `parent`/`name`, with the recipe's page, whose commands work there; its run is called `name`.

    Raises ConfigError if there is no such recipe, if the name cannot be a run's, or if it exists already.
    """
    if recipe not in RECIPES:
        near = difflib.get_close_matches(recipe, RECIPES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"recipes: {', '.join(RECIPES)}"
        raise ConfigError(f"recipe = {recipe!r}: there is none; {hint}")
    config = FILES / "configs" / f"{recipe}.toml"
    parse_config({**read_values(config), "name": name})
    folder = parent / name
    if folder.exists():
        raise ConfigError(f"{folder} exists already; choose another name, or remove it")
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=parent) as scratch:
        new = Path(scratch, name)
        page = NEXT.sub("", (FILES / "docs" / f"{recipe}.md").read_text())
        for package in {recipe, *EXAMPLE.findall(page)}:
            source = FILES / "examples" / package
            shutil.copytree(source, new / "examples" / package, ignore=shutil.ignore_patterns("__*"))
        shutil.copy(FILES / "examples" / "tiny.py", new / "examples")
        (new / "configs").mkdir()
        renamed = config.read_text().replace(f'name = "{recipe}"', f'name = "{name}"', 1)
        pointed = renamed.replace(f"docs/tutorials/recipes/{recipe}.md", "README.md")
        (new / "configs" / f"{recipe}.toml").write_text(pointed)
        page = LINK.sub(r"\1", page)  # the pages that links lead to are not copied
        (new / "README.md").write_text(re.sub(rf"^(grpo \w+ ){recipe}\b", rf"\g<1>{name}", page, flags=re.MULTILINE))
        new.rename(folder)
    return folder


def keys() -> None:
    """List every configuration key: default, bounds or choices, meaning."""
    terminal = Terminal()
    for key, default, accepts, meaning in describe_keys():
        terminal.print(f"{key} = {default or '(none)'}   [{accepts}]", style="bold")
        terminal.print(Padding(meaning, (0, 0, 0, 4)))
