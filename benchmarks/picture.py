"""The comparison as a picture: how many times faster (or smaller), a bar a case and side, with its gate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIDES = {"TRL default": "#b8c4d6", "TRL tuned": "#2f5d9b"}
HEIGHT = 0.36


def draw(document: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    cases = document["cases"]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.62 * len(cases)), layout="constrained")
    for row, case in enumerate(cases):
        for place, (side, colour) in enumerate(SIDES.items()):
            ratio, y = case["ratios"][side], row + (place - 0.5) * HEIGHT
            axes.barh(y, ratio, HEIGHT, color=colour, label=side if row == 0 else None)
            axes.text(ratio, y, f" {ratio:.1f}×", va="center", fontsize=9)
            if side in case["gates"]:
                gate = case["gates"][side]
                axes.plot([gate, gate], [y - HEIGHT / 2, y + HEIGHT / 2], color="#c0392b", linewidth=2)
    axes.plot([], [], color="#c0392b", linewidth=2, label="gate")
    axes.axvline(1, color="#444", linewidth=0.8)
    axes.set_yticks(range(len(cases)), [case["about"] for case in cases])
    axes.invert_yaxis()
    axes.set_xlim(0, max(max(case["ratios"].values()) for case in cases) * 1.12)
    axes.set_xlabel("TRL's figure over ours (seconds, or memory where it says so): more is better")
    axes.set_title(f"grpo-flows against TRL {document['packages']['trl']}, {document['hardware']}", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
