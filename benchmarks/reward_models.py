"""Trains the dialogue recipe against two reward models: the reward rises with both, correct answers only with one.

    python -m examples.dialogue.make
    python -m benchmarks.reward_models [--tiny]

Skips runs that are trained already, and prints how many held-out answers help. `recipe_curves` draws the picture.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import polars as pl

from benchmarks.command import parse
from examples.dialogue.make import helpful
from tasks.rendering.drawing import GREEN, RED, Points, plot, png, series

EXAMPLE = Path("storage", "examples", "dialogue")
RUNS = {"dialogue": "good reward model", "gamed": "weak reward model"}
WEAK = ["--set", "name=gamed", "--set", f"rewards.0.args.model={EXAMPLE / 'weak-reward-model'}"]
TINY = ["--set", "train.max_steps=1", "--set", "train.per_device_train_batch_size=8", "--set", "train.warmup_steps=0"]


def main() -> None:
    options = parse(argparse.ArgumentParser(description=str(__doc__).partition("\n")[0]))
    for changes in ([], WEAK):
        further = [*changes, *(TINY if options.tiny else [])]
        subprocess.run([sys.executable, "-m", "flows.cli.main", "run", "configs/dialogue.toml", *further], check=True)
    print(*map(report, RUNS), sep="\n")


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Read the figures of each update of a run."""
    return [json.loads(line) for line in (run / "training" / "metrics.jsonl").read_text().splitlines()]


def curves() -> dict[str, dict[str, Points]]:
    """Curves by panel and run: the reward, and the share of answers that help, over the updates."""
    folders = {label: Path("storage", "runs", run) for run, label in RUNS.items()}
    return {
        "reward": {label: series(metrics_of(run), "reward") for label, run in folders.items()},
        "right answers, %": {label: share_helpful(run / "training") for label, run in folders.items()},
    }


def draw(panels: Mapping[str, Mapping[str, Points]]) -> bytes:
    def two(figure: Any) -> None:
        left, beside = figure.subplots(1, 2)
        for axes, (title, lines) in zip((left, beside), panels.items(), strict=True):
            axes.set(title=title)
            plot(axes, lines, [GREEN, RED], legend=axes is left)
        beside.set_ylim(0, 100)

    return png((9, 2.8), two)


def share_helpful(training: Path) -> Points:
    """(update, per cent of sampled completions that say hello and the right steps) for each update."""
    answers = {json.dumps(row["prompt"]): helpful(row) for row in pl.read_parquet(EXAMPLE / "train.parquet").to_dicts()}
    right: dict[int, list[bool]] = {}
    for row in pl.read_parquet(training / "completions" / "*.parquet").to_dicts():
        right.setdefault(row["step"], []).append(row["completion"].strip() == answers[json.dumps(row["prompt"])])
    return [(step, 100 * mean(of_one)) for step, of_one in sorted(right.items())]


def report(run: str) -> str:
    """Describe the same share of the held-out answers, before and after the training."""
    answers = [helpful(row) for row in pl.read_parquet(EXAMPLE / "eval.parquet").to_dicts()]
    samples = pl.read_parquet(Path("storage", "runs", run, "evaluation", "samples.parquet")).sort("row")
    shares = [
        mean(said.strip() == answer for said, answer in zip(samples[f"{policy}/completion"], answers, strict=True))
        for policy in ("base", "trained")
    ]
    return f"{RUNS[run]}: {shares[0]:.1%} of held-out answers help before the training, {shares[1]:.1%} after it"


if __name__ == "__main__":
    main()
