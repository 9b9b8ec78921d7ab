"""`grpo rollouts`: the rollouts that a training has sampled, in the terminal or as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.style import Style
from rich.table import Column
from rich.text import Text

from flows.cli.terminal import Terminal, option, refuse, say, table_of
from grpo_core.errors import GrpoError
from grpo_core.system.libraries import quiet_libraries
from tasks.stages.files import write_text
from tasks.stages.run_directory import find_run

if TYPE_CHECKING:
    from tasks.reports.rollouts import Rollouts
    from tasks.reports.tokens import Piece

IN_TERMINAL, IN_PAGE = 5, 50  # rollouts shown without --limit
TURN_STYLES = {"policy": "blue", "environment": "dim", "failed": "yellow"}
SHADES = {
    "advantage": (34, 128, 95),
    "negative": (196, 106, 18),
    "surprise": (47, 100, 171),
    "age": (138, 79, 163),
    "ratio": (34, 128, 95),
    "entropy": (138, 79, 163),
}


def rollouts(
    run: Annotated[str, typer.Argument(help="name of a run; its training may still be under way")],
    order: Annotated[str, typer.Option(help="worst, best, longest or step (in their order)")] = "",
    reward: Annotated[str | None, option("order by this reward instead of the weighted sum")] = None,
    step: Annotated[str | None, option("only those sampled for this update, or for a range: 40-60")] = None,
    text: Annotated[str | None, option("only those with this text in prompt or completion")] = None,
    prompt: Annotated[
        str | None, option("follow one prompt over the training: its row, or text that it contains")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help=f"most to show; default: {IN_TERMINAL}, in a page {IN_PAGE}")
    ] = None,
    colour: Annotated[
        str | None, option("colour tokens by advantage, surprise or age; by ratio or entropy under the trained policy")
    ] = None,
    html: Annotated[Path | None, option("write a page to this file")] = None,
) -> None:
    """Show rollouts that a training has sampled: the worst first, or those asked for.

    Exit status 2: no such run, or none of its rollouts matches.
    """
    from tasks.reports.rollouts import ORDERS, choose_rollouts, rollouts_page, with_trained_policy
    from tasks.reports.tokens import COLOURED_BY, COMPUTED

    chosen = next((known for known in ORDERS if known == (order or ("step" if prompt else "worst"))), None)
    if chosen is None:
        refuse(f"--order {order}: give one of {', '.join(ORDERS)}")
    if colour and colour not in COLOURED_BY:
        refuse(f"--colour {colour}: give one of {', '.join(COLOURED_BY)}")
    most = limit or (IN_PAGE if html else IN_TERMINAL)
    folder = find_run(run)
    found = choose_rollouts(folder, chosen, most, reward, step, text, prompt)
    if colour in COMPUTED:
        quiet_libraries()
        found = with_trained_policy(folder, found)
    if colour and colour not in found.colours:
        refuse(f"--colour {colour}: not recorded in this run, which has {', '.join(found.colours)}")
    if not html:
        _print(found, colour or "", _tokenizer(found) if colour else None)
        return
    tokenizer, note = None, ""
    try:
        tokenizer = _tokenizer(found)
    except GrpoError as error:
        if colour:
            raise
        note = f"Tokens are not shown one by one: {error}"
    write_text(html, rollouts_page(found, tokenizer, colour or "", note))
    say(f"{len(found.rows):,} rollouts: {html}")


def _tokenizer(found: Rollouts) -> Any:
    from tasks.data.lengths import load_tokenizer_and_context

    quiet_libraries()
    return load_tokenizer_and_context(found.config.model)[0]


def _print(found: Rollouts, colour: str, tokenizer: Any) -> None:
    from tasks.reports.conversations import trained_on
    from tasks.reports.rollouts import by_step, describe, pieces_of, with_images_in_words

    terminal = Terminal()
    if found.prompt is not None:
        table = by_step(found)
        terminal.print(table_of([Column(name, justify="right") for name in table.head], table.rows))
    pieces = pieces_of(found, tokenizer) if colour else [None for _ in found.rows]
    for row, of_row in zip(with_images_in_words(found), pieces, strict=True):
        terminal.print(f"\n{describe(row)}", style="bold")
        _print_sample(terminal, trained_on(row), of_row, colour)
    terminal.print(f"\n{found.summary}", style="dim")
    if colour:
        terminal.print(f"Colour: {found.colours[colour]}.", style="dim")


def _print_sample(terminal: Terminal, sample: Mapping[str, Any], pieces: Sequence[Piece] | None, colour: str) -> None:
    """Print a rollout in the page's order: prompt, then completion or turns."""
    [policy] = sample["policies"]
    asked = [(role, "".join(pieces)) for role, pieces in sample["prompt"]]
    for role, text in [*asked, *([("reset", sample["opening"])] if sample["opening"] else [])]:
        terminal.print(_indented(Text(f"{role}: {text}" if role else text, style="dim")))
    if pieces is not None:
        terminal.print(_indented(_coloured(pieces, colour)))
    elif policy["conversation"] is None:
        terminal.print(_indented(Text(policy["completion"])))
    else:
        for turn in policy["conversation"]["turns"]:
            said = [turn["text"], *(f"→ {call}" for call in turn["calls"])]
            head = f"{turn['who']}: " if turn["who"] else ""
            terminal.print(_indented(Text(head + "\n".join(filter(None, said)), style=TURN_STYLES[turn["kind"]])))
        if failure := policy["conversation"]["failure"]:
            terminal.print(_indented(Text(f"The environment failed: {failure}", style="red")))
    given = policy["rewards"] or policy["conversation"]["rewards"]
    terminal.print(_indented(Text(given, style="dim")))


def _coloured(pieces: Sequence[Piece], colour: str) -> Text:
    from tasks.reports.tokens import LEVELS

    text = Text()
    for piece in pieces:
        level = piece.levels.get(colour, 0)
        red, green, blue = SHADES["negative" if level < 0 else colour]
        style = Style(color="white", bgcolor=f"rgb({red},{green},{blue})") if 2 * abs(level) > LEVELS else None
        if level and style is None:
            style = Style(color=f"rgb({red},{green},{blue})", underline=True)
        text.append(piece.text, style or ("dim" if not piece.levels else ""))
    return text


def _indented(text: Text) -> Padding:
    return Padding(text, (0, 0, 0, 2), expand=False)
