"""Renders a self-contained HTML page of text, charts and tables. Text from outside (data, names) is escaped."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2

from tasks.rendering.visible import visible

Cell = str | tuple[str, str]  # text, or text and a smaller line below it


@dataclass(frozen=True)
class Table:
    """A table. `words`: True if the cells are words rather than figures."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    words: bool = False


@dataclass(frozen=True)
class Chart:
    title: str
    svg: str
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A section of the page. `legend`: label → colour, for all charts. `samples`: by evaluation set. `rollouts`:
    samples one below the other, whose tokens the reader can colour by one of `colours` (name → meaning), initially by
    `colour`. `trajectories`: samples by title, and `folded`: long texts, both opened by a click.

    Empty parts are left out of the page, and so is a section whose parts are all empty.
    """

    title: str
    text: str = ""
    legend: Mapping[str, str] = field(default_factory=dict)
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    samples: Mapping[str, Any] = field(default_factory=dict)
    colours: Mapping[str, str] = field(default_factory=dict)
    colour: str = ""
    rollouts: Sequence[Any] = ()
    trajectories: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    folded: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        shown = (self.charts, self.tables, self.notes, self.samples, self.rollouts, self.trajectories, self.folded)
        return not (self.text or any(shown))


@dataclass(frozen=True)
class Verdict:
    """A verdict. `tone`: better, worse or open."""

    tone: str
    headline: str
    sentence: str = ""


@dataclass(frozen=True)
class Tile:
    """One large figure. `policy`: the policy that it belongs to, or ""."""

    label: str
    figure: str
    note: str
    policy: str = ""


def render(
    title: str,
    subtitle: str,
    verdicts: Sequence[Verdict],
    sections: Sequence[Section],
    tiles: Sequence[Tile] = (),
    links: Mapping[str, str] | None = None,
) -> str:
    """Render the page as HTML; its subtitle ends with the present time. `links`: text → address."""
    return _template().render(
        title=title,
        subtitle=f"{subtitle} · {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        verdicts=verdicts,
        sections=[section for section in sections if not section.is_empty],
        tiles=tiles,
        links=links or {},
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tasks.rendering"),
        autoescape=True,
        finalize=lambda value: visible(value) if type(value) is str else value,  # HTML is left as it is
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html")
