"""Output and refusals of all commands: a GrpoError ends the command with its message on stderr and its exit status."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from typer.core import TyperGroup

from grpo_core.errors import GrpoError
from tasks.rendering.visible import shortened

FAILED, REFUSED = 1, 2
LONGEST = 20_000  # characters of a printed text: a list of mistakes may be long


class Refusal(GrpoError):
    """Raised when a command refuses or fails."""

    def __init__(self, message: str, exit_status: int = REFUSED):
        super().__init__(message)
        self.exit_status = exit_status


class Commands(TyperGroup):
    """The commands of the app. Prints every GrpoError that one of them raises, and explains a missing argument by its
    help text."""

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


class Terminal(Console):
    """Console of the commands. Prints strings, in tables too, without markup and control characters, and at most
    LONGEST characters of each. A `Text` keeps its style: pass its content through `visible` first."""

    def __init__(self, *, stderr: bool = False, soft_wrap: bool = False):
        super().__init__(stderr=stderr, soft_wrap=soft_wrap, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(shortened(text, LONGEST).expandtabs(), **options)  # rich measures a tab as nothing


def option(help: str) -> Any:
    """An option whose help says what its default means."""
    return typer.Option(help=help, show_default=False)


def set_option(help: str = "override one key") -> Any:
    """The option --set, which can be repeated."""
    return typer.Option("--set", metavar="KEY=VALUE", help=help)


def table_of(head: Iterable[str | Column], rows: Iterable[Iterable[Any]], title: str | None = None) -> Table:
    table = Table(*head, title=title)
    for row in rows:
        table.add_row(*row)
    return table


def say(text: str) -> None:
    Terminal(soft_wrap=True).print(text)


def print_refusal(message: str) -> None:
    Terminal(stderr=True, soft_wrap=True).print(message, style="red")


def refuse(message: str, exit_status: int = REFUSED) -> NoReturn:
    """End the command with this message."""
    raise Refusal(message, exit_status)


@contextmanager
def refusals(about: str, started: bool = False) -> Iterator[None]:
    """Prefix errors of the body with `about`. `started`: the body does the command's work, so an error is a failure
    (1), no longer a refusal (2)."""
    try:
        yield
    except GrpoError as error:
        status = FAILED if started and error.exit_status == REFUSED else error.exit_status
        said = str(error)
        raise Refusal(said if said.startswith(f"{about}: ") else f"{about}: {said}", status) from error
