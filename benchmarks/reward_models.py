"""The dialogue recipe against two reward models, as a picture: the reward rises in both, right answers in one.

    python -m examples.dialogue.make
    python -m benchmarks.reward_models [--output docs/images/reward-models.png]

Trains what is not trained yet; a run that is there is drawn as it is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import polars as pl

from examples.dialogue.make import helpful
from tasks.rendering.drawing import GREEN, RED, Points, plot, png, series

EXAMPLE = Path("storage", "examples", "dialogue")
RUNS = {"dialogue": "good reward model", "gamed": "weak reward model"}
WEAK = ["--set", "name=gamed", "--set", f"rewards.0.args.model={EXAMPLE / 'weak-reward-model'}"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.reward_models", description="Draw a good and a gamed reward.")
    parser.add_argument("--output", type=Path, default=Path("docs", "images", "reward-models.png"))
    output: Path = parser.parse_args().output
    for changes in ([], WEAK):
        subprocess.run([sys.executable, "-m", "flows.cli.main", "run", "configs/dialogue.toml", *changes], check=True)
    output.write_bytes(draw())
    print(*map(report, RUNS), sep="\n")


def draw() -> bytes:
    """Two panels over the updates: the reward of each run, and the share of its answers that help."""
    rewards, right = {}, {}
    for run, label in RUNS.items():
        training = Path("storage", "runs", run, "training")
        rows = [json.loads(line) for line in (training / "metrics.jsonl").read_text().splitlines()]
        rewards[label], right[label] = series(rows, "reward"), share_helpful(training)

    def panels(figure: Any) -> None:
        left, beside = figure.subplots(1, 2)
        for axes, title, lines in ((left, "reward", rewards), (beside, "right answers, %", right)):
            axes.set(title=title)
            plot(axes, lines, [GREEN, RED], legend=axes is left)
        beside.set_ylim(0, 100)

    return png((9, 2.8), panels)


def share_helpful(training: Path) -> Points:
    """(update, per cent) of sampled completions that say hello and the right steps."""
    answers = {json.dumps(row["prompt"]): helpful(row) for row in pl.read_parquet(EXAMPLE / "train.parquet").to_dicts()}
    right: dict[int, list[bool]] = {}
    for row in pl.read_parquet(training / "completions" / "*.parquet").to_dicts():
        right.setdefault(row["step"], []).append(row["completion"].strip() == answers[json.dumps(row["prompt"])])
    return [(step, 100 * mean(of_one)) for step, of_one in sorted(right.items())]


def report(run: str) -> str:
    """The same share of the held-out answers, before and after, as a sentence."""
    answers = [helpful(row) for row in pl.read_parquet(EXAMPLE / "eval.parquet").to_dicts()]
    samples = pl.read_parquet(Path("storage", "runs", run, "evaluation", "samples.parquet")).sort("row")
    shares = [
        mean(said.strip() == answer for said, answer in zip(samples[f"{policy}/completion"], answers, strict=True))
        for policy in ("base", "trained")
    ]
    return f"{RUNS[run]}: {shares[0]:.1%} of held-out answers help before the training, {shares[1]:.1%} after it"


if __name__ == "__main__":
    main()
