"""Writes the page of all configuration keys: `python -m flows.cli.keys_page PAGE`, called by `make reference`."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from flows.parameters.form import FIRST
from grpo_core.config.files import describe_keys

PAGES = {  # by section, links to the pages that explain it, relative to the generated page
    "model": "[models](algorithm.md#models)",
    "data": "[data](data.md)",
    "data.sources": "[several sources](../how-to/mixed-data.md)",
    "data.checks": "[rules about rows](data.md#rules-about-rows)",
    "data.curriculum": "[prompts that teach](../how-to/curriculum.md)",
    "rewards": "[rewards](rewards.md)",
    "rollout": "[sampling](algorithm.md#sampling), [vLLM servers](../how-to/vllm-server.md)",
    "environment": "[tools and environments](../how-to/environments.md)",
    "algorithm": "[the algorithm](algorithm.md)",
    "train": "[the plan](plan.md), [training](algorithm.md#training)",
    "launch": "[several machines](../how-to/cluster.md)",
    "health": "[health limits](algorithm.md#health-limits)",
    "evaluation": "[evaluation](../explanation/evaluation.md)",
    "evaluation.sets": "[sets](../explanation/evaluation.md#sets-categories-guards)",
    "registry": "[files and tags](files.md#in-mlflow)",
    "promotion": "[promotion](../how-to/promote.md)",
    "promotion.guards": "[guards](../explanation/evaluation.md#sets-categories-guards)",
}
REPEATED = ("rewards", "data.sources", "evaluation.sets", "promotion.guards")  # one table of TOML per item: [[rewards]]
HEAD = """# Configuration

For those who write a configuration: each key with its default, what it accepts and what it
means. `grpo keys` prints the same. `make reference` writes this page from the code, so do not edit it.

A configuration is a TOML file. A section is a table, `[train]`. One in double brackets may come
several times, `[[rewards]]`. `--set section.key=value` overrides one key and may be repeated. List
items count from 0: `--set rewards.0.weight=0.5`. Whole files: [of the recipes](../../configs), [for one
GPU](../../configs/gsm8k.toml).
"""
END = """
Next: [rewards](rewards.md), [data](data.md), [what a run's files contain](files.md).
"""


def keys_as_markdown() -> str:
    """Return the page as Markdown: a table per section, in the order of `grpo keys`."""
    sections: dict[str, list[str]] = {}
    for section, rows in groupby(describe_keys(), key=lambda row: row[0].rpartition(".")[0]):
        sections.setdefault(section, []).extend(_row(*row) for row in rows)
    first = ", ".join(f"[`{key}`](#{key})" for key in FIRST)
    shown = "".join(_section(name, rows) for name, rows in sections.items())
    return f"{HEAD}\nMost runs set only these: {first}.\n{shown}{END}"


def _section(name: str, rows: list[str]) -> str:
    title = "At the top of the file" if not name else f"`[[{name}]]`" if name in REPEATED else f"`[{name}]`"
    more = f"More: {PAGES[name]}.\n\n" if name else ""
    table = "\n".join(["| key | default | accepts | meaning |", "|---|---|---|---|", *rows])
    return f"\n## {title}\n\n{more}{table}\n"


def _row(key: str, default: str, accepts: str, meaning: str) -> str:
    shown = default if default == "required" else f"`{default}`" if default else "none"
    cells = (f'<a id="{key}"></a>`{key.rpartition(".")[2]}`', shown, accepts, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(keys_as_markdown())
