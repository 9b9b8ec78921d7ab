"""Commands as pages give them: those in fenced code, and whether the command line takes them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

import typer

from flows.cli.main import app

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
