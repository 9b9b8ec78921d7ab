"""Draws the comparison: how many times as fast (or small) as TRL, one bar per case and side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIDES = {"TRL default": "#b8c4d6", "TRL tuned": "#2f5d9b"}
PARTS = ("end to end, sampling included", "training phase alone", "memory")
HEIGHT = 0.36
GAP = 0.9  # between parts, for the heading of the next one


def draw(document: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    cases = sorted(document["cases"], key=_part)
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.66 * len(cases)), layout="constrained")
    rows = [row + GAP * _part(case) for row, case in enumerate(cases)]
    for number, (row, case) in enumerate(zip(rows, cases, strict=True)):
        if number == 0 or _part(case) != _part(cases[number - 1]):
            axes.text(0.05, row - 0.62, PARTS[_part(case)], fontweight="bold", bbox={"color": "white", "pad": 1})
        for place, (side, colour) in enumerate(SIDES.items()):
            ratio, y = case["ratios"][side], row + (place - 0.5) * HEIGHT
            axes.barh(y, ratio, HEIGHT, color=colour, label=f"beside {side}" if number == 0 else None)
            axes.text(ratio, y, f" {ratio:.1f}×", va="center", fontsize=9)
    axes.axvline(1, color="#444", linewidth=0.8)
    axes.set_yticks(rows, [case["about"] for case in cases])
    axes.set_ylim(rows[-1] + 0.6, -1.1)
    axes.set_xlim(0, max(max(case["ratios"].values()) for case in cases) * 1.12)
    axes.set_xlabel("times as fast as TRL (memory: TRL's over ours)")
    device = f"{document['hardware']}, no GPU" if "cores" in document["hardware"] else document["hardware"]
    versions = ", ".join(sorted({case["packages"]["trl"] for case in cases}))
    axes.set_title(f"grpo-flows beside TRL {versions} on {device}", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", bbox_to_anchor=(1.0, -0.08), ncols=2, frameon=False)  # below the bars
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _part(case: dict[str, Any]) -> int:
    """Index in PARTS of a case's part. A replayed workload excludes sampling."""
    return 2 if case["unit"] == "MiB" else int(case["workload"]["mode"] == "replay")
