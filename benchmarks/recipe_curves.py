"""Draws the pictures of recipes whose trainings take minutes, from a record made once.

    python -m benchmarks.recipe_curves [--record]

Draws docs/images/distil.png, guess.png, mixed.png, reward-models.png and smollm.png from results/recipe-curves.json.
With --record, first records those of their runs that are in storage/runs: guess, mixed, dialogue, gamed, smollm, and of
distil three seeds with the teacher and three with GRPO instead (distil-0, distil-grpo-0 and so on).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import reward_models
from examples.guess import curve as guess
from examples.mixed import curve as mixed
from grpo_core.config.files import load_config
from tasks.rendering.drawing import BLUE, GREEN, GREY, finish, plot, png, series

RECORD = Path("benchmarks", "results", "recipe-curves.json")
IMAGES = Path("docs", "images")
RUNS = Path("storage", "runs")
DIGITS = 5  # of a figure in the record
SEEDS = range(3)
DISTIL = {"the teacher": "distil", "GRPO": "distil-grpo"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.recipe_curves", description="Draw the curves of recipes.")
    parser.add_argument("--record", action="store_true", help="first record the runs that are in storage/runs")
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if parser.parse_args().record:
        record |= {name: read() for name, (runs, read, _) in PICTURES.items() if all(map(_is_trained, runs))}
        RECORD.write_text(json.dumps(_rounded(record), separators=(",", ":"), sort_keys=True) + "\n")
    for name, (*_, draw) in PICTURES.items():
        (IMAGES / f"{name}.png").write_bytes(draw(record[name]))


def _is_trained(run: str) -> bool:
    return (RUNS / run / "training" / "metrics.jsonl").is_file()


def _read_distil() -> Any:
    metric = "rewards/numeric_match/mean"
    return {
        by: [series(reward_models.metrics_of(RUNS / f"{run}-{seed}"), metric) for seed in SEEDS]
        for by, run in DISTIL.items()
    }


def _draw_distil(recorded: Mapping[str, Any]) -> bytes:
    def panel(figure: Any) -> None:
        axes = figure.subplots()
        for (by, curves), colour in zip(recorded.items(), (GREEN, BLUE), strict=True):
            for seed, points in enumerate(curves):
                axes.plot(*zip(*points, strict=True), color=colour, linewidth=1, label=None if seed else f"by {by}")
        axes.set(title="share of right samples, three seeds each", ylim=(-0.03, 1.03))
        finish(axes, len(recorded))

    return png((6, 2.8), panel)


def _read_guess() -> Any:
    return [(row["step"], guess.guesses(row["reward"])) for row in reward_models.metrics_of(RUNS / "guess")]


def _read_mixed() -> Any:
    sources = load_config(RUNS / "mixed" / "config.toml").evaluated_sources
    names = ["step", *(f"{metric}/{source}" for metric in mixed.PANELS for source in sources)]
    rows = [{name: row[name] for name in names if name in row} for row in reward_models.metrics_of(RUNS / "mixed")]
    return {"sources": [*sources], "rows": rows}


def _draw_mixed(recorded: Mapping[str, Any]) -> bytes:
    return mixed.draw(recorded["rows"], recorded["sources"])


def _read_smollm() -> Any:
    report = json.loads((RUNS / "smollm" / "evaluation" / "report.json").read_text())
    held_out = {name: of["accuracy"]["mean"] for name, of in report["sets"]["held-out"]["policies"].items()}
    rewards = [(row["step"], row["reward"]) for row in reward_models.metrics_of(RUNS / "smollm")]
    return {"rewards": rewards, **held_out}


def _draw_smollm(recorded: Mapping[str, Any]) -> bytes:
    def panel(figure: Any) -> None:
        axes, points = figure.subplots(), [(step, 100 * reward) for step, reward in recorded["rewards"]]
        plot(axes, {"in training": points}, [BLUE], legend=False)
        for policy, colour, at in [("base", GREY, 1), ("trained", GREEN, 0)]:
            right, ends = 100 * recorded[policy], (points[0][0], points[-1][0])
            axes.plot(ends, (right, right), color=colour, linestyle="--")
            text, beside = f"{policy}, held out: {right:.1f} %", {"ha": ("left", "right")[at]}
            axes.annotate(text, (ends[at], right), (0, 3), textcoords="offset points", **beside)
        axes.set(title="right answers, %, by update", ylim=(0, 100))

    return png((6, 2.8), panel)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(it) for key, it in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(it) for it in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


PICTURES: dict[str, tuple[tuple[str, ...], Callable[[], Any], Callable[[Any], bytes]]] = {  # runs, record, draw
    "distil": (tuple(f"{run}-{seed}" for run in DISTIL.values() for seed in SEEDS), _read_distil, _draw_distil),
    "guess": (("guess",), _read_guess, guess.draw),
    "mixed": (("mixed",), _read_mixed, _draw_mixed),
    "reward-models": (tuple(reward_models.RUNS), reward_models.curves, reward_models.draw),
    "smollm": (("smollm",), _read_smollm, _draw_smollm),
}

if __name__ == "__main__":
    main()
