"""Plans every GRPO recipe of TRL, Open-R1 and ms-swift: scripts, YAML files, and the shell and YAML blocks of pages.

    python -m benchmarks.recipes trl=GIT_DIR open-r1=GIT_DIR ms-swift=GIT_DIR [--output benchmarks/results/recipes.md]

Each clone's HEAD is read (`git archive`), and each recipe planned by `grpo plan --recipe` in that tree, with the number
of rows that it states (`#ROWS`), else with 8,000 prompts. If a command can be read in the simplest way, the figures are
compared with those of the framework's own code (benchmarks/recipe_arithmetic.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from benchmarks.recipe_arithmetic import expected
from flows.cli.main import app

PROMPTS = 8000
SYSTEMS = {"trl": "trl", "open-r1": "trl", "ms-swift": "swift"}
FILES = ("*.sh", "*.slurm", "*.yaml", "*.md", "*.py")
FOLDERS = ("examples", "docs/source", "docs/source_en", "recipes", "slurm", "trl/skills", "README.md")
TRANSLATED = {"ms-swift": "docs/source/"}  # the same pages in Chinese
ABOUT_GRPO = re.compile(r"grpo|gspo|rloo|rlhf_type|on_policy_dist|opd_rl", re.I)
TRAINS = re.compile(r"^[^#\n]*\b(swift|megatron|trl|python|accelerate|torchrun|sbatch)\b", re.M)
YAML_RECIPE = re.compile(r"^(model_name_or_path|rlhf_type|model):", re.M)
BLOCK = re.compile(r"^[ \t]*```(\w*)[^\n]*\n(.*?)^[ \t]*```", re.S | re.M)
SHELL = ("bash", "shell", "sh")
COMMAND = re.compile(
    r"^[ \t]*(?:[A-Z_]+=\S+ )*(?:python|accelerate|trl|torchrun|swift|megatron|uv run|vllm) (?:.*\\\n)*.*", re.M
)
NAMED = re.compile(r"\s*#\s*(\S+\.yaml)")
DOCSTRING = re.compile(r'\A(?:#[^\n]*\n|\s)*r?"""(.*?)"""', re.S)


@dataclass(frozen=True)
class Text:
    """A recipe: its file in the clone, the number of its block in that file, and the block's text."""

    source: str
    block: str | None
    is_yaml: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.recipes", description="Plan the recipes of other systems.")
    parser.add_argument("clones", nargs="+", metavar="NAME=GIT_DIR", help=f"NAME: {', '.join(SYSTEMS)}")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/recipes.md"))
    arguments = parser.parse_args()
    output = arguments.output.resolve()
    tables = []
    for clone in arguments.clones:
        name, _, git_dir = clone.partition("=")
        commit = subprocess.run(["git", f"--git-dir={git_dir}", "rev-parse", "HEAD"], capture_output=True, text=True)
        with tempfile.TemporaryDirectory() as folder:
            tables.append(_table(name, commit.stdout.strip(), _extracted(Path(git_dir), Path(folder))))
    head = (
        "# Recipes of other systems, planned\n\n`python -m benchmarks.recipes`: 8,000 prompts, or the rows that the "
        "recipe says. W: training processes (Megatron: replicas of the model). Own code: the framework's own code, run "
        "on the same values, gives the same batch and steps, or refuses too.\n"
    )
    output.write_text("\n".join([head, *tables]))
    print(f"wrote {output}")


def _extracted(git_dir: Path, folder: Path) -> Path:
    archive = subprocess.run(["git", f"--git-dir={git_dir.resolve()}", "archive", "HEAD"], capture_output=True)
    if archive.returncode:
        raise SystemExit(f"{git_dir}: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "--extract", f"--directory={folder}"], input=archive.stdout, check=True)
    return folder


def _table(name: str, commit: str, tree: Path) -> str:
    rows, counts = [], Counter[str]()
    with contextlib.chdir(tree):
        for text in _texts(name):
            path, answer = _planned(text, SYSTEMS[name])
            kind = "valid" if answer["valid"] else "refused"
            theirs = expected(path, SYSTEMS[name], answer.get("num_prompts") or PROMPTS)
            agreed = "" if theirs is None else "yes" if _agrees(answer, theirs) else f"**no: {theirs}**"
            counts.update([kind, *(["compared"] if agreed else []), *(["differing"] if "no" in agreed else [])])
            keys = ("num_prompts", "num_processes", "num_generations", "generation_batch_size", "max_steps")
            figures = [f"{answer[key]:,}" if answer["valid"] else "" for key in keys]
            reason = "" if answer["valid"] else answer["errors"][0].replace("|", "/").replace(str(tree), ".")
            rows.append(f"| {text.source} | {kind} | {' | '.join(figures)} | {agreed} | {reason} |")
    summary = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    print(f"{name}: {len(rows)} texts, {summary}")
    return "\n".join(
        [
            f"\n## {name} at {commit[:12]}: {len(rows)} texts, {summary}\n",
            "| recipe | answer | N | W | G | batch | steps | own code | reason |",
            "|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _texts(name: str) -> Iterator[Text]:
    """Yield every recipe in the working folder, in the order of the files."""
    paths = sorted({path for pattern in FILES for path in Path().rglob(pattern)})
    for path in paths:
        if not str(path).startswith(FOLDERS) or str(path).startswith(TRANSLATED.get(name, "//")):
            continue
        text = path.read_text(errors="replace")
        if path.suffix in (".sh", ".slurm"):
            if ABOUT_GRPO.search(text + str(path)) and TRAINS.search(text) and "grpo" in f"{path}{text}".lower():
                yield Text(str(path), None)
        elif path.suffix == ".yaml":
            if "grpo" in f"{path}{text}".lower() and YAML_RECIPE.search(text):
                yield Text(str(path), None)
        else:
            yield from _blocks(path, text)


def _blocks(path: Path, text: str) -> Iterator[Text]:
    """Yield the recipes among the blocks of a page or of a Python file's docstring; without blocks, each command in
    it."""
    if path.suffix == ".py":
        found = DOCSTRING.search(text)
        text = found.group(1) if found and ABOUT_GRPO.search(f"{path}{found.group(1)}") else ""
    blocks = [match.groups() for match in BLOCK.finditer(text)]
    if path.suffix == ".py" and not any(language in SHELL for language, _ in blocks):
        blocks = [("sh", match.group()) for match in COMMAND.finditer(text)]
    for number, (language, block) in enumerate(blocks):
        about = path.suffix == ".py" or ABOUT_GRPO.search(f"{block}{path}")
        if language == "yaml" and YAML_RECIPE.search(block):
            if (named := NAMED.match(block)) and "grpo" not in named.group(1):  # it belongs to a command that follows
                Path(named.group(1)).write_text(block)
            else:
                yield Text(f"{path} #{number}", block, is_yaml=True)
        elif language in SHELL and about and TRAINS.search(block):
            yield Text(f"{path} #{number}", block)


def _planned(text: Text, system: str) -> tuple[Path, dict[str, Any]]:
    """Return the recipe's file, and the answer of `grpo plan`. A page's YAML is named by its first line."""
    path = Path(text.source)
    if text.block is not None:
        named = NAMED.match(text.block)
        path = Path(named.group(1) if named else "block.yaml" if text.is_yaml else "block.sh")
        path.write_text(text.block)
    answer = _answer(path, system)
    if any("number of prompts is not known" in error for error in answer["errors"]):
        answer = _answer(path, system, "--num-prompts", str(PROMPTS))
    return path, answer


def _answer(path: Path, system: str, *options: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["plan", "--recipe", system, str(path), "--json", *options])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return json.loads(done.stdout)


def _agrees(answer: dict[str, Any], theirs: tuple[int, int] | str) -> bool:
    if isinstance(theirs, str):
        return not answer["valid"]
    return answer["valid"] and (answer["generation_batch_size"], answer["max_steps"]) == theirs


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "200")
    main()
