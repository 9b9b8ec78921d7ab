"""Commands of `grpo`: those that pages give in fenced code, whether they are taken, and what they print."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence

import typer
from typer.testing import CliRunner

from flows.cli.main import app
from grpo_core.planning.nvidia import list_devices
from tests.held import held

SHELLS = ("", "sh", "bash", "shell", "console")
FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def fenced(text: str, *languages: str) -> list[str]:
    """The blocks of fenced code in one of these languages."""
    return [block for language, block in FENCE.findall(text) if language in languages]


def grpo_commands(text: str) -> list[list[str]]:
    """The arguments of every `grpo …` in the fenced code of a page, whatever runs before it on its line."""
    return [
        words[1:]
        for block in fenced(text, *SHELLS)
        for line in block.replace("\\\n", " ").splitlines()
        for words in _commands(line.strip().removeprefix("$ "))
        if words and words[0].removeprefix(".venv/bin/") == "grpo"
    ]


def parse(arguments: Sequence[str]) -> dict[str, object]:
    """The parameters that the command line makes of these arguments. Raises a usage error if it refuses them."""
    command, name, rest = typer.main.get_command(app), "grpo", list(arguments)
    while subcommands := getattr(command, "commands", None):
        name, *rest = rest
        command = subcommands[name]
    return command.make_context(name, rest).params


def run_here(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command of `grpo` in this process: no import is paid for; `environment`: further variables."""
    list_devices.cache_clear()  # a process of its own would ask nvidia-smi
    with held(os.environ, environment):
        done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def _commands(line: str) -> list[list[str]]:
    """The simple commands of a line, without assignments in front of them."""
    try:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError:  # a quote is open: program text or output
        return []
    commands: list[list[str]] = [[]]
    for word in words:
        if set(word) <= set("&|;<>"):
            commands.append([])
        elif commands[-1] or not re.fullmatch(r"\w+=.*", word):
            commands[-1].append(word)
    return commands
