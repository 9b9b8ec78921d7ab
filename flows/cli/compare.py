"""`grpo compare`: runs side by side, in the terminal and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from flows.cli.terminal import Terminal, refuse
from tasks.rendering.visible import visible
from tasks.stages.files import write_text

if TYPE_CHECKING:
    from tasks.rendering import page

MOST_RUNS = 6  # more curves in one picture cannot be told apart


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN RUN...", help="name of a run, MLflow run id, MODEL@ALIAS or MODEL/VERSION"),
    ],
    html: Annotated[Path | None, typer.Option(help="write the comparison, with curves, to this file too")] = None,
) -> None:
    """Show how runs differ, their figures, and whether each is better than the first on the same prompts."""
    from tasks.reports.compare import comparison, comparison_page
    from tasks.reports.record import load_record

    if not 2 <= len(runs) <= MOST_RUNS or len({*runs}) < len(runs):
        refuse(f"{' '.join(runs)}: name from two to {MOST_RUNS} runs, each once")
    records = {run: load_record(run) for run in runs}
    terminal = Terminal()
    for section in comparison(records):
        show(section, terminal)
    if html:
        write_text(html, comparison_page(records))
        terminal.print(f"\nthe same with curves: {html}", soft_wrap=True)


def show(section: page.Section, terminal: Terminal) -> None:
    """Print a section of a comparison."""
    terminal.print(f"\n{section.title}", style="bold")
    if section.text:
        terminal.print(section.text, style="dim")
    for it in section.tables:
        table = Table(title=it.title or None, title_justify="left", title_style="")
        for place, name in enumerate(it.head):
            table.add_column(name, justify="right" if place and not it.words else "left", overflow="fold")
        for row in it.rows:
            table.add_row(*(cell if isinstance(cell, str) else _two_lines(*cell) for cell in row))
        terminal.print(table)
    for note in section.notes:
        terminal.print(note, style="yellow")


def _two_lines(main: str, small: str) -> Text:
    return Text.assemble(visible(main), "\n", (visible(small), "dim"))
