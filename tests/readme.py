"""README's own run: its files and commands, as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from textwrap import dedent

import polars as pl

README = Path(__file__).parents[1] / "README.md"


def own_run() -> tuple[list[str], str, str, list[list[str]]]:
    """The columns of a row of prompts, the reward, the configuration, and the commands after `grpo`."""
    section = README.read_text().partition("## Your own run\n")[2].partition("\n## ")[0]
    blocks = [dedent(block) for block in re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", section, re.MULTILINE)]
    rows, reward, config, commands = (block.strip() + "\n" for block in blocks)
    columns = pl.read_ndjson(rows.encode()).columns
    given = [shlex.split(line, comments=True) for line in commands.splitlines()]
    assert all(command[0] in ("grpo", "export") for command in given)
    return columns, reward, config, [command[1:] for command in given if command[0] == "grpo"]


def write_own_run(folder: Path, num_prompts: int, held_out: int) -> list[list[str]]:
    """Write README's files, with as many sums as asked for; its commands."""
    columns, reward, config, commands = own_run()
    sums = [(f"{n % 90 + 10}+{n // 90 + 10}=", str(n % 90 + n // 90 + 20)) for n in range(num_prompts + held_out)]
    frame = pl.DataFrame(sums, columns, orient="row").sample(fraction=1, shuffle=True, seed=0)
    frame[:num_prompts].write_ndjson(folder / "train.jsonl")
    frame[num_prompts:].write_ndjson(folder / "held-out.jsonl")
    (folder / "my_rewards.py").write_text(reward)
    (folder / "mine.toml").write_text(config)
    return commands
