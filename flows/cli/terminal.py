"""What commands print, and how every one of them refuses: an error for a person ends the command with its sentence on
stderr and its exit status, printed in one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from grpo_core.errors import GrpoError

FAILED, REFUSED = 1, 2


class Refusal(GrpoError):
    """A command that refuses or fails."""

    def __init__(self, message: str, exit_status: int = REFUSED):
        super().__init__(message)
        self.exit_status = exit_status


class Commands(TyperGroup):
    """The commands of the app. Every GrpoError that one of them raises is printed here; an argument that is missing is
    named together with what it is."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except GrpoError as error:
            print_refusal(str(error))
            raise typer.Exit(error.exit_status) from None
        except typer.BadParameter as error:
            meaning = getattr(error.param, "help", None)
            if meaning and not error.message:
                error.message = meaning[0].upper() + meaning[1:]
            raise


def say(text: str) -> None:
    Console().print(text, markup=False, highlight=False, soft_wrap=True)


def print_refusal(message: str) -> None:
    Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)


def refuse(message: str, exit_status: int = REFUSED) -> NoReturn:
    """End the command with this message."""
    raise Refusal(message, exit_status)


@contextmanager
def refusals(about: str, started: bool = False) -> Iterator[None]:
    """Let an error of the body begin with the name of what it is about. `started`: the body does the command's work, so
    that an error there is a failure (1), no longer a refusal (2)."""
    try:
        yield
    except GrpoError as error:
        status = FAILED if started and error.exit_status == REFUSED else error.exit_status
        raise Refusal(f"{about}: {error}", status) from error
