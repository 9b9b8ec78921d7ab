"""Measures what a policy learns from a text that its prompt does not show: taught by itself as it is now, by a
moving average of its weights, or by the base that it began as.

    python -m benchmarks.self_distillation [--tiny]

The task of the recipe distil, numbers to be written backwards. The base writes each digit one too high, nine times in
ten, and copies an answer that stands in front of the prompt. No reward counts. Prints a table.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState

from benchmarks.command import ROOT, parse
from examples import tiny
from examples.distil.make import RIGHT, demonstrate, make_numbers, make_row
from grpo_core.config.files import dump_config, parse_config
from grpo_core.planning.plan import make_plan, plan_inputs
from grpo_core.training.loop import train

TEMPLATE = "{answer}|{prompt}"
STEPS = 600  # of the base
RATES = (0.1, 0.01)
SHOWN = (1, 10, 20, 30, 40, 50, 60)  # updates


def make(folder: Path, steps: int) -> int:
    """Make prompts and base; returns the number of training prompts."""
    rows, held_out = ([make_row(number) for number in numbers] for numbers in make_numbers())
    tiny.write_rows(folder, rows, held_out)
    rng, shown = random.Random(tiny.SEED), list[tiny.Demonstration]()
    for row in rows:
        shown.append((row["prompt"], demonstrate(row["answer"], RIGHT, rng)))
        shown.append((TEMPLATE.format(**row), row["answer"]))
    tiny.make_base(folder / "base", shown, steps)
    return len(rows)


def trained(folder: Path, name: str, teacher: dict[str, Any], prompts: int, updates: int) -> list[dict[str, float]]:
    """Train with this teacher; returns the metrics of each update."""
    values = tomllib.loads((ROOT / "configs" / "distil.toml").read_text())
    values["model"]["name_or_path"] = str(folder / "base")
    values["teacher"] = {"template": TEMPLATE, **teacher}
    values["rollout"]["engine"] = "transformers"
    values["train"] |= {"max_steps": updates, "warmup_steps": min(updates - 1, 5), "eval_steps": updates}
    config, run = parse_config(values), folder / name
    (run / "dataset").mkdir(parents=True)
    for data in ("train", "eval"):
        (run / "dataset" / f"{data}.parquet").symlink_to(folder / f"{data}.parquet")
    (run / "config.toml").write_text(dump_config(config))
    (run / "plan.json").write_text(json.dumps({"plan": asdict(make_plan(plan_inputs(config, prompts)))}))
    train(run, run / "training")
    AcceleratorState._reset_state(reset_partial_state=True)
    return [json.loads(line) for line in (run / "training" / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    options = parse(argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]))
    with tempfile.TemporaryDirectory() as place:
        folder, updates = Path(place), 2 if options.tiny else max(SHOWN)
        prompts = make(folder, 1 if options.tiny else STEPS)
        rates = RATES[:1] if options.tiny else RATES
        averages = [(f"average at {rate}", {"update_rate": rate}) for rate in rates]
        for name, teacher in (("itself", {}), *averages, ("base", {"model": str(folder / "base")})):
            steps = trained(folder, name, teacher, prompts, updates)
            print(f"\ntaught by {name}: accuracy on held-out prompts {steps[-1]['eval_accuracy']:.1%}")
            for update in (update for update in SHOWN if update <= updates):
                right, gap = (steps[update - 1][key] for key in ("rewards/numeric_match/mean", "privileged_gap"))
                print(f"  update {update:2}: {right:.2f} right, privileged_gap {gap:.2f}")


if __name__ == "__main__":
    main()
