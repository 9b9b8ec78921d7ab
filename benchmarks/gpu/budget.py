"""Draws where a step on an H200 went, from the records in benchmarks/results: `python -m benchmarks.gpu.budget`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
PICTURE = RESULTS / "h200-update.png"
RECORDS = {  # record and part → what it says of the layers
    ("h200-b0fa3950.json", "update-0.5B"): "layers by torch's operations",
    ("h200-4aa0d3c3.json", "train-0.5B"): "layers by torch's operations",
    ("h200-4aa0d3c3.json", "liger-0.5B"): "Liger's kernels patched in",
}
KINDS = {"products": "nvjet|cutlass", "attention": "flash", "elementwise": "elementwise"}
COLOURS = {"products": "#2f5d9b", "attention": "#6f93c4", "elementwise": "#d9a441", "smaller kernels": "#ead2a0"}
COLOURS |= {"update, GPU idle": "#c96f5b", "update": "#9aa7b8", "sampling and scoring": "#7a9a6b", "neither": "#e2b5ab"}


def budget(rows: dict[str, str]) -> dict[str, float]:
    """Milliseconds of a step by what they went into; kernels by the profile's twelve largest, if there is one."""

    def first(pattern: str, found: str) -> float:
        match = re.search(pattern, found)
        assert match, f"no {pattern!r} in {found!r}"
        return float(match[1])

    text = "; ".join(f"{what}: {found}" for what, found in rows.items())
    update, sampling = first(r"(?:^|; )update: ([\d.]+) ms", text), first(r"generate ([\d.]+)", text)
    step = first(r"between two (?:log lines|lines of the log:) ([\d.]+)", text)
    parts = {"update": update, "sampling and scoring": sampling, "neither": step - update - sampling}
    if "kernels, " not in text:
        return parts
    kernels = first(r"kernels, (?:all )?together: ([\d.]+)", text)
    largest = {
        kind: sum(first(r"([\d.]+)", found) for what, found in rows.items() if re.search(pattern, what))
        for kind, pattern in KINDS.items()
    }
    within = largest | {"smaller kernels": kernels - sum(largest.values()), "update, GPU idle": update - kernels}
    return within | {name: parts[name] for name in ("sampling and scoring", "neither")}


def records() -> Iterator[tuple[str, dict[str, float]]]:
    """Label of each record's bar, and its budget."""
    for (name, part), about in RECORDS.items():
        document: dict[str, Any] = json.loads((RESULTS / name).read_text())
        parts = document.get("parts") or [each for run in document["runs"] for each in run["parts"]]
        measured = [each for each in parts if each["part"] == part and "error" not in each]
        rows = {row["what"]: row["found"] for row in measured[-1]["rows"]}
        yield f"{about},\ncommit {document['commit'][:8]}", budget(rows)


def main() -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    bars = [*records()]
    figure, axes = pyplot.subplots(figsize=(10, 3.6), layout="constrained")
    for row, (_, parts) in enumerate(bars):
        left = 0.0
        for name, value in parts.items():
            axes.barh(row, value, 0.6, left, color=COLOURS[name], label=name)
            if value >= 15:
                axes.text(left + value / 2, row, f"{value:.0f}", ha="center", va="center", fontsize=9)
            left += value
        axes.text(left, row, f" {left:.0f} ms", va="center", fontsize=9)
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.invert_yaxis()
    axes.set_xlabel("ms of a step whose completions are replayed: 0.5B, 28,138 packed tokens, bf16, one H200")
    axes.spines[["top", "right"]].set_visible(False)
    handles = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    axes.legend(
        handles.values(), handles.keys(), loc="upper center", bbox_to_anchor=(0.4, -0.2), ncols=4, frameon=False
    )
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
