"""Writes the pages of all configuration keys and of all commands into a folder: `python -m flows.cli.reference_pages
FOLDER`, called by `make reference`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import typer

from flows.cli.main import app
from flows.parameters.form import FIRST
from grpo_core.config.files import describe_keys

KEY_PAGES = {  # by section, links to the pages that explain it, relative to the generated page
    "model": "[models](algorithm.md#models)",
    "data": "[data](data.md)",
    "data.sources": "[several sources](../how-to/mixed-data.md)",
    "data.checks": "[rules about rows](data.md#rules-about-rows)",
    "data.curriculum": "[prompts that teach](../how-to/curriculum.md)",
    "rewards": "[rewards](rewards.md)",
    "rollout": "[sampling](algorithm.md#sampling), [vLLM servers](../how-to/vllm-server.md)",
    "environment": "[tools and environments](../how-to/environments.md)",
    "algorithm": "[the algorithm](algorithm.md)",
    "warm_start": "[warm start](../how-to/warm-start.md)",
    "teacher": "[teachers](../how-to/teachers.md)",
    "train": "[the plan](plan.md), [training](algorithm.md#training)",
    "launch": "[several machines](../how-to/cluster.md)",
    "health": "[health limits](algorithm.md#health-limits)",
    "evaluation": "[evaluation](../explanation/evaluation.md)",
    "evaluation.sets": "[sets](../explanation/evaluation.md#sets-categories-guards)",
    "registry": "[files and tags](files.md#in-mlflow)",
    "promotion": "[promotion](../how-to/promote.md)",
    "publish": "[exports](../how-to/publish.md)",
    "promotion.guards": "[guards](../explanation/evaluation.md#sets-categories-guards)",
}
REPEATED = ("rewards", "data.sources", "evaluation.sets", "promotion.guards")  # one table of TOML per item: [[rewards]]
KEYS_HEAD = """# Configuration

For those who write a configuration: each key with its default, what it accepts and what it
means. `grpo keys` prints the same. `make reference` writes this page from the code, so do not edit it.

A configuration is a TOML file. A section is a table, `[train]`. One in double brackets may come
several times, `[[rewards]]`. `--set section.key=value` overrides one key and may be repeated. List
items count from 0: `--set rewards.0.weight=0.5`. Whole files: [of the recipes](../../configs), [for one
GPU](../../configs/gsm8k.toml).
"""
KEYS_END = """
Next: [rewards](rewards.md), [data](data.md), [what a run's files contain](files.md).
"""


def keys_as_markdown() -> str:
    """Return the page as Markdown: a table per section, in the order of `grpo keys`."""
    sections: dict[str, list[str]] = {}
    for section, rows in groupby(describe_keys(), key=lambda row: row[0].rpartition(".")[0]):
        sections.setdefault(section, []).extend(_key_row(*row) for row in rows)
    first = ", ".join(f"[`{key}`](#{key})" for key in FIRST)
    shown = "".join(_keys_table(name, rows) for name, rows in sections.items())
    return f"{KEYS_HEAD}\nMost runs set only these: {first}.\n{shown}{KEYS_END}"


def _keys_table(name: str, rows: list[str]) -> str:
    title = "At the top of the file" if not name else f"`[[{name}]]`" if name in REPEATED else f"`[{name}]`"
    more = f"More: {KEY_PAGES[name]}.\n\n" if name else ""
    table = "\n".join(["| key | default | accepts | meaning |", "|---|---|---|---|", *rows])
    return f"\n## {title}\n\n{more}{table}\n"


def _key_row(key: str, default: str, accepts: str, meaning: str) -> str:
    shown = default if default == "required" else f"`{default}`" if default else "none"
    cells = (f'<a id="{key}"></a>`{key.rpartition(".")[2]}`', shown, accepts, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


COMMAND_PAGES = {  # by command, the page that explains it, relative to the generated page
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
    "serve-model": "../how-to/serve.md",
    "worker": "../how-to/work-pools.md",
    "data check": "../how-to/own-data.md",
    "data schema": "../how-to/own-data.md#a-contract-to-hand-on",
    "rewards list": "rewards.md",
    "rewards try": "../how-to/own-rewards.md#try-it",
    "env try": "../how-to/environments.md#try-it-as-the-policy",
}
COMMANDS_HEAD = """# Commands

Every command of `grpo` with all its options: what `--help` says. `make reference` writes this page from the code, so do
not edit it. What exit statuses mean: [files](files.md#exit-codes).

`grpo` is in `.venv/bin` of the clone: [set up your shell](../how-to/install.md#your-shell).
"""
COMMANDS_END = """
Next: [configuration](configuration.md), [environment variables](environment-variables.md).
"""


def commands_as_markdown() -> str:
    """Return the page as Markdown: a section per command, in the order of `grpo --help`."""
    found = dict(_commands("", typer.main.get_command(app)))
    contents = ", ".join(f"[{name}](#grpo-{name.replace(' ', '-')})" for name in found)
    return (
        f"{COMMANDS_HEAD}\n{contents}\n"
        + "".join(_command_section(name, command) for name, command in found.items())
        + COMMANDS_END
    )


def _commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    inside = getattr(command, "commands", None)
    if inside is None:
        yield name, command
    else:
        for part, each in inside.items():
            yield from _commands(f"{name} {part}".strip(), each)


def _command_section(name: str, command: Any) -> str:
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(["grpo", name, *command.collect_usage_pieces(context)])
    rows = [_option_row(*record) for each in command.params if (record := each.get_help_record(context))]
    rows = [row for row in rows if not row.startswith("| `--help`")]
    table = "\n".join(["| argument or option | meaning |", "|---|---|", *rows])
    paragraphs = re.sub(r"(?<!\n)\n(?!\n)", " ", command.help.strip())
    page = Path(COMMAND_PAGES[name].partition("#")[0])
    more = f"More: [{page.parent.name if page.stem == 'README' else page.stem}]({COMMAND_PAGES[name]})."
    return f"\n## grpo {name}\n\n```text\n{usage}\n```\n\n{paragraphs}\n\n{table}\n\n{more}\n"


def _option_row(shown: str, meaning: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (f"`{shown}`", " ".join(meaning.split()))) + " |"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "configuration.md").write_text(keys_as_markdown())
    (folder / "commands.md").write_text(commands_as_markdown())
