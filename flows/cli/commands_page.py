"""Writes the page of all commands: `python -m flows.cli.commands_page PAGE`, called by `make reference`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from flows.cli.main import app

PAGES = {  # by command, the page that explains it, relative to the generated page
    "init": "../tutorials/recipes/README.md",
    "plan": "plan.md",
    "run": "../how-to/run.md",
    "sweep": "../how-to/sweep.md",
    "schedule": "../how-to/run.md#on-a-schedule",
    "stage": "../how-to/recover.md#one-stage-again",
    "status": "../how-to/recover.md#what-is-up-to-date",
    "rollouts": "../how-to/rollouts.md",
    "compare": "../how-to/compare.md",
    "promote": "../how-to/promote.md",
    "rollback": "../how-to/promote.md",
    "clean": "../how-to/servers.md#free-disk-space",
    "keys": "configuration.md",
    "up": "../how-to/run.md#start-the-servers",
    "serve": "../how-to/servers.md#for-several-machines",
    "worker": "../how-to/work-pools.md",
    "data check": "../how-to/own-data.md",
    "data schema": "../how-to/own-data.md#a-contract-to-hand-on",
    "rewards list": "rewards.md",
    "rewards try": "../how-to/own-rewards.md#try-it",
    "env try": "../how-to/environments.md#try-it-as-the-policy",
}
HEAD = """# Commands

Every command of `grpo` with all its options: what `--help` says. `make reference` writes this page from the code, so do
not edit it. What exit statuses mean: [files](files.md#exit-codes).

`grpo` is in `.venv/bin` of the clone: [set up your shell](../how-to/install.md#your-shell).
"""
END = """
Next: [configuration](configuration.md), [environment variables](environment-variables.md).
"""


def commands_as_markdown() -> str:
    """Return the page as Markdown: a section per command, in the order of `grpo --help`."""
    found = dict(_commands("", typer.main.get_command(app)))
    contents = ", ".join(f"[{name}](#grpo-{name.replace(' ', '-')})" for name in found)
    return f"{HEAD}\n{contents}\n" + "".join(_section(name, command) for name, command in found.items()) + END


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    inside = getattr(command, "commands", None)
    if inside is None:
        yield name, command
    else:
        for part, each in inside.items():
            yield from _commands(f"{name} {part}".strip(), each)


def _section(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(["grpo", name, *command.collect_usage_pieces(context)])
    rows = [_row(*record) for each in command.params if (record := each.get_help_record(context))]
    rows = [row for row in rows if not row.startswith("| `--help`")]
    table = "\n".join(["| argument or option | meaning |", "|---|---|", *rows])
    paragraphs = re.sub(r"(?<!\n)\n(?!\n)", " ", command.help.strip())
    page = Path(PAGES[name].partition("#")[0])
    more = f"More: [{page.parent.name if page.stem == 'README' else page.stem}]({PAGES[name]})."
    return f"\n## grpo {name}\n\n```text\n{usage}\n```\n\n{paragraphs}\n\n{table}\n\n{more}\n"


def _row(shown: str, meaning: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (f"`{shown}`", " ".join(meaning.split()))) + " |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(commands_as_markdown())
