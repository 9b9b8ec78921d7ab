"""What a command says to the person who typed it."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console


def say(text: str) -> None:
    Console().print(text, markup=False, highlight=False, soft_wrap=True)


def refuse(message: str, code: int = 2) -> NoReturn:
    """End the command with this message on stderr."""
    Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)
