"""Draws pictures with matplotlib in one style: PNG for Prefect and MLflow, SVG in the page's colours for pages."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from tasks.rendering.visible import shortened

Points = Sequence[tuple[float, float]]
Row = dict[str, float]

INK, BLUE, ORANGE = "#222222", "#3366aa", "#cc7722"
GREEN, PURPLE, GREY, RED = "#2a8f6d", "#9a5fb0", "#7a7a7a", "#cc3333"
LINE_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, GREY, RED)
PAGE_COLOURS = {  # variables of the page's style sheet, which follow its dark mode
    INK: "currentColor",
    BLUE: "var(--blue)",
    ORANGE: "var(--orange)",
    GREEN: "var(--green)",
    PURPLE: "var(--purple)",
    GREY: "var(--grey)",
    RED: "var(--red)",
}
STYLE: dict[Any, Any] = {  # Any, since matplotlib's type for keys is a union of literals
    "font.size": 9,
    "text.parse_math": False,  # a category may be called "$5 to $10"
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.13,
    "grid.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.fonttype": "none",  # text stays text, in the page's font
    "svg.hashsalt": "grpo",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}
PANEL = (4.6, 2.35)  # inches: two side by side on a desktop screen, one on a phone
SMOOTHED_FROM = 40  # points; shorter lines have markers
WINDOW = 10  # points of the running mean; the same for runs of any length, so that they can be compared
MOST_POINTS = 600  # per line; more are averaged
BINS = 40
LONGEST_LABEL = 40  # characters of a category; leaves space for the picture


def svg(draw: Callable[[Any], None], size: tuple[float, float] = PANEL) -> str:
    """Draw with `draw(axes)` and return an SVG element for a page: transparent, as wide as the page makes it."""
    with _figure(size) as figure:
        draw(figure.subplots())
        text = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    element = text.getvalue()[text.getvalue().index("<svg") :]
    element = re.sub(r"<(metadata|style)\b.*?</\1>", "", element, flags=re.DOTALL)
    element = re.sub(r'^<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg class="chart" viewBox="\1">', element)
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', element))
    element = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", element)
    element = element.replace("xlink:href", "href")
    for colour, name in PAGE_COLOURS.items():
        element = element.replace(colour, name)
    return element


def png(size: tuple[float, float], draw: Callable[[Any], None]) -> bytes:
    """Draw with `draw(figure)` and return a PNG on white."""
    picture = io.BytesIO()
    with _figure(size) as figure:
        draw(figure)
        figure.savefig(picture, dpi=110)
    return picture.getvalue()


@contextmanager
def _figure(size: tuple[float, float]) -> Iterator[Any]:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        yield Figure(figsize=size, layout="constrained")


def series(rows: Sequence[Row], name: str, scale: float = 1.0) -> Points:
    """(update, value) of each row that has the metric."""
    return [(row["step"], scale * row[name]) for row in rows if name in row]


def plot(
    axes: Any, lines: Mapping[str, Points], colours: Sequence[str], smooth: bool = True, legend: bool = True
) -> None:
    """Plot each line against the update: a short line with its points marked, a long one faintly under its running
    mean."""
    for (label, points), colour in zip(lines.items(), colours, strict=True):
        x, y = _thinned(points)
        if len(points) < SMOOTHED_FROM:
            axes.plot(x, y, color=colour, label=label, marker=".")
        elif smooth:
            axes.plot(x, y, color=colour, alpha=0.35, linewidth=0.8)
            recent = recent_mean(np.array([value for _, value in points], dtype=float), WINDOW)
            smoothed = [*zip((step for step, _ in points), recent, strict=True)]
            axes.plot(*_thinned(smoothed), color=colour, label=label, linewidth=1.8)
        else:
            axes.plot(x, y, color=colour, label=label)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5))
    finish(axes, len(lines) if legend else 0)


def finish(axes: Any, labels: int) -> None:
    """Put integers on the x axis, and a legend above the picture if there is more than one line."""
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel="update")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    axes.margins(x=0.02)
    if labels > 1:
        legend_above(axes, labels)


def legend_above(axes: Any, labels: int) -> None:
    """Put the legend above the data, where it covers nothing."""
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=min(labels, 3), borderaxespad=0.2, handlelength=1.2)


def recent_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of each value and the `window` - 1 values before it, or fewer at the beginning."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def draw_curves(rows: Sequence[Row]) -> bytes:
    """Curves of reward, completion length, KL and entropy, and seconds against the update."""
    panels = {
        "reward": {"reward": "sampled", "eval_reward": "held out"},
        "completion length, tokens": {"completions/mean_length": "mean", "completions/max_length": "longest"},
        "KL and entropy, nats": {"kl": "KL to the reference", "entropy": "entropy"},
        "seconds per update": {"step_time": "all", "time/generate": "sampling"},
    }

    def draw(figure: Any) -> None:
        for axes, (title, metrics) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
            colours = dict(zip(metrics.values(), LINE_COLOURS, strict=False))
            lines = {label: points for name, label in metrics.items() if (points := series(rows, name))}
            axes.set(title=title)
            plot(axes, lines, [colours[label] for label in lines])

    return png((9, 5.6), draw)


def draw_lengths(lengths: Mapping[str, Collection[float]], room: Mapping[str, int | None]) -> bytes:
    """Draw a histogram of the prompt lengths, one panel per data set; a line marks the longest allowed length if it is
    near."""
    rows = -(-len(lengths) // 2)

    def draw(figure: Any) -> None:
        panels = figure.subplots(rows, min(len(lengths), 2), squeeze=False).ravel()
        for axes in panels[len(lengths) :]:
            axes.set_axis_off()
        for axes, (name, values) in zip(panels, lengths.items(), strict=False):
            histogram(axes, {name: values}, [BLUE])
            axes.set(title=f"{name}: {len(values):,} prompts", ylabel="prompts")
            limit = room[name]
            if limit is not None and limit < 2 * max(values):
                axes.set_xlim(right=max(axes.get_xlim()[1], 1.02 * limit))
                axes.axvline(limit, color=RED, linestyle="--")
                above = {"xycoords": ("data", "axes fraction"), "ha": "right", "va": "bottom"}
                axes.annotate(f"limit {limit:,}", (limit, 1.01), color=RED, **above)

    return png((7, 2.6 * rows), draw)


def histogram(axes: Any, values: Mapping[str, Collection[float]], colours: Sequence[str]) -> None:
    """Draw a histogram of integers, several series side by side in the same bins."""
    from matplotlib.ticker import MaxNLocator

    first, last = min(map(min, values.values())), max(map(max, values.values()))
    edges = np.arange(first, last + 1 + (step := (last - first) // (BINS // len(values)) + 1), step) - 0.5
    axes.hist([*values.values()], bins=edges, color=[*colours], label=[*values])
    axes.set_xlim(left=min(edges[0], last - 3), right=max(edges[-1], first + 3))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.set(xlabel="tokens")
    if len(values) > 1:
        legend_above(axes, len(values))


def forest(
    axes: Any,
    rows: Sequence[tuple[str, Mapping[str, tuple[float, float, float]]]],
    colours: Mapping[str, str],
    shares: bool,
) -> None:
    """Draw a point and its interval, (mean, low, high), for each labelled row and policy; the first row at the top.
    `shares`: whether the values are shares, shown in per cent."""
    from matplotlib.ticker import PercentFormatter

    policies = [policy for policy in colours if any(policy in found for _, found in rows)]
    spread = 0.22
    for place, policy in enumerate(policies):
        shift = (place - (len(policies) - 1) / 2) * spread
        found = {row: values[policy] for row, (_, values) in enumerate(rows) if policy in values}
        mean, low, high = np.array([*found.values()]).T
        axes.errorbar(
            mean,
            np.array([*found]) + shift,
            xerr=[mean - low, high - mean],
            fmt="o",
            markersize=5,
            elinewidth=2,
            color=colours[policy],
            label=policy,
        )
    axes.set_yticks(range(len(rows)), [shortened(" ".join(label.split()), LONGEST_LABEL) for label, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(left=False)
    axes.grid(False, axis="y")
    if shares:
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    legend_above(axes, len(policies))


def stacked(axes: Any, x: Sequence[float], parts: Mapping[str, Collection[float]]) -> None:
    """Draw areas on top of each other, the first at the bottom."""
    edges, heights = np.array(x), np.array([*parts.values()])  # (N,), (K, N)
    size = -(-len(edges) // MOST_POINTS)
    if size > 1:
        starts = np.arange(0, len(edges), size)
        heights = np.add.reduceat(heights, starts, axis=1) / np.diff([*starts, len(edges)])
        edges = edges[starts]
    axes.stackplot(edges, heights, labels=parts, colors=LINE_COLOURS, alpha=0.85, linewidth=0, step="mid")
    finish(axes, len(parts))


def _thinned(points: Points) -> tuple[np.ndarray, np.ndarray]:
    """The points, or the means of neighbouring points if there are more than MOST_POINTS."""
    pairs = np.array(points, dtype=float)  # (N, 2)
    size = -(-len(pairs) // MOST_POINTS)
    starts = np.arange(0, len(pairs), size)
    means = np.add.reduceat(pairs, starts) / np.diff([*starts, len(pairs)])[:, None]
    return means[:, 0], means[:, 1]
