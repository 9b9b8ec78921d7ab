"""What the first pages have a newcomer type: their commands, and the first run's files, as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"
FIRST_RUN = TUTORIALS / "your-first-run.md"
PAGES = (ROOT / "README.md", TUTORIALS / "quickstart.md", FIRST_RUN, *sorted((TUTORIALS / "recipes").glob("*.md")))


def commands_of(page: Path) -> list[list[str]]:
    """The words of each command in the page's shell blocks."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = (line for block in blocks for line in block.replace("\\\n", " ").replace(" && ", "\n").splitlines())
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def write_first_run(folder: Path) -> None:
    """The files that the first run says to save."""
    named_blocks = re.compile(r"Save this as `([\w.]+)`.*?^```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
    said = named_blocks.findall(FIRST_RUN.read_text())
    assert [name for name, _ in said] == ["make_sums.py", "my_rewards.py", "mine.toml"]
    for name, text in said:
        (folder / name).write_text(text)
