"""Rewards and held-out accuracies of a training on several sources, task by task, as a picture.

python -m examples.mixed.curve [storage/runs/mixed] [--output mixed.png]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_core.config.files import load_config
from tasks.rendering.drawing import LINE_COLOURS, Row, plot, png, series

PANELS = {"reward": "reward in training", "eval_accuracy": "held out: right answers, %"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="examples.mixed.curve", description=str(__doc__).partition("\n")[0])
    parser.add_argument(
        "run", type=Path, nargs="?", default=Path("storage", "runs", "mixed"), help="directory of a run"
    )
    parser.add_argument("--output", type=Path, default=Path("mixed.png"), help="default mixed.png")
    options = parser.parse_args()
    metrics: Path = options.run / "training" / "metrics.jsonl"
    if not metrics.is_file():
        parser.error(f"there is no {metrics}; name the directory of a run that has trained")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    options.output.write_bytes(draw(rows, load_config(options.run / "config.toml").evaluated_sources))
    print(f"wrote {options.output}")


def draw(rows: Sequence[Row], sources: Sequence[str]) -> bytes:
    """The curves over the updates: one line per source."""

    def panels(figure: Any) -> None:
        for axes, (metric, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
            scale = 100 if title.endswith("%") else 1
            lines = {source: series(rows, f"{metric}/{source}", scale) for source in sources}
            plot(axes, lines, LINE_COLOURS[: len(lines)])
            axes.set(title=title, xlabel="update")

    return png((8, 2.8), panels)


if __name__ == "__main__":
    main()
