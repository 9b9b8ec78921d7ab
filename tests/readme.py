"""What the first pages have a newcomer type: their commands, and the first run's files, as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"
FIRST_RUN = TUTORIALS / "your-first-run.md"
ENVIRONMENTS = ROOT / "docs" / "how-to" / "environments.md"
PAGES = (
    ROOT / "README.md",
    TUTORIALS / "quickstart.md",
    FIRST_RUN,
    ENVIRONMENTS,
    *sorted((TUTORIALS / "recipes").glob("*.md")),
)
FILES = {
    FIRST_RUN: ["make_sums.py", "my_rewards.py", "mine.toml"],
    ENVIRONMENTS: ["my_shop.py", "make_orders.py", "mine.toml", "turns.txt"],
}


def commands_of(page: Path) -> list[list[str]]:
    """The words of each command in the page's shell blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = (line for block in blocks for line in block.replace("\\\n", " ").replace(" && ", "\n").splitlines())
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def write_files(page: Path, folder: Path) -> None:
    """The files that a page says to save."""
    named_blocks = re.compile(r"Save this as `([\w.]+)`.*?^```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
    said = named_blocks.findall(page.read_text())
    assert [name for name, _ in said] == FILES[page]
    for name, text in said:
        (folder / name).write_text(text)
