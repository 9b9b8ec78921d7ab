"""Measures whether a curriculum learns from fewer samples: trains a recipe with each kind and with none, paired by
seed.

    python -m benchmarks.curriculum [half | most] [--seeds 3 | --again] [--output FOLDER] [--tiny]

Uses the quickstart's base and held-out sums. In the case `half`, half of the prompts are the quickstart's own, of two
digits, and half have one or three, which this base never gets right; in the case `most`, four of five have three. A
probe's samples count: the curve of an arm with a probe begins that much later. One training per core runs at a time,
with one thread each. Writes curriculum.json, or curriculum-most.json, after each training, and a picture at the end,
and prints the table of the pages. With --again, nothing is trained: the recorded trainings are compared again.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np
import polars as pl

from benchmarks.command import ROOT, parse, python_path
from grpo_core.config.files import dump_config, parse_config
from grpo_core.evaluation.statistics import seed_difference
from grpo_core.planning.plan import make_plan, plan_inputs

LAST = 4  # evaluations whose mean is the held-out reward at the end: one alone moves by more than what is compared
REACHED = 0.9  # share of the gain without a curriculum; samples until then are counted
HALVED = "the band, probe, batches of half the size"  # about as many groups with a signal per update as with none
BAND = {"kind": "band", "band": [0.1, 0.9]}


@dataclass(frozen=True)
class Case:
    """A data set with a part that is out of reach, and the trainings on it."""

    title: str
    prompts: int
    out_of_reach: int  # number of such prompts
    digits: tuple[int, ...]  # of the numbers in these prompts
    held_out: int
    completions: int  # per update
    updates: int
    evaluations: int
    learning_rate: float
    arms: dict[str, dict[str, Any]]


CASES = {
    "half": Case(
        "half of the prompts out of reach",
        prompts=512,
        out_of_reach=256,
        digits=(1, 3),
        held_out=200,
        completions=256,
        updates=40,
        evaluations=8,
        learning_rate=1e-4,  # the quickstart's
        arms={
            "none": {},
            "easy to hard, probe": {"kind": "easy_to_hard", "probe": 4},
            "band 0.1 to 0.9, probe": BAND | {"probe": 4},
            "p(1 − p), probe": {"kind": "variance", "probe": 4},
            "p(1 − p)": {"kind": "variance"},
            HALVED: BAND | {"probe": 4},
        },
    ),
    "most": Case(
        "four of five prompts out of reach",
        prompts=1280,
        out_of_reach=1024,
        digits=(3,),
        held_out=300,
        completions=64,
        updates=480,
        evaluations=16,
        learning_rate=1e-5,
        arms={
            "none": {},
            "band 0.1 to 0.9": BAND,
            "p(1 − p)": {"kind": "variance"},
            "band 0.1 to 0.9, probe": BAND | {"probe": 4},
        },
    ),
}
COLOURS = {
    "none": "#444444",
    "easy to hard, probe": "#b8c4d6",
    "band 0.1 to 0.9": "#e9b44c",
    "band 0.1 to 0.9, probe": "#d9822b",
    "p(1 − p), probe": "#2f5d9b",
    "p(1 − p)": "#7fb2e5",
    HALVED: "#b5472f",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.curriculum", description="Curricula beside none.")
    parser.add_argument("case", nargs="?", choices=CASES, default="half")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--again", action="store_true", help="compare the recorded trainings again")
    arguments = parse(parser, writes=True)
    case, name = CASES[arguments.case], "curriculum" if arguments.case == "half" else "curriculum-most"
    if arguments.tiny:
        case = cut_down(case)
    path = arguments.output / f"{name}.json"
    for document in [_again(path)] if arguments.again else learn(case, range(arguments.seeds)):
        path.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document))
    draw(case, document, arguments.output / f"{name}.png")


def cut_down(case: Case) -> Case:
    """Make a case so small that it shows only that it runs."""
    arms = dict([*case.arms.items()][:2])
    sizes = {"prompts": 24, "out_of_reach": 12, "held_out": 8, "completions": 16, "updates": 4, "evaluations": 2}
    return replace(case, arms=arms, **sizes)


def learn(case: Case, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield, after each training, all trainings so far and their differences to the one without a curriculum."""
    _python("examples.arithmetic.make")
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count()) as pool:
        trainings = [
            pool.submit(_train, Path(scratch, f"{seed}-{position}"), case, arm, seed)
            for position, arm in enumerate(case.arms)
            for seed in seeds
        ]
        for training in as_completed(trainings):
            found.append(training.result())
            found.sort(key=lambda each: (each["seed"], list(case.arms).index(each["arm"])))
            print(json.dumps(training.result()), flush=True)
            yield {
                "prompts": case.prompts,
                "out_of_reach": case.out_of_reach,
                "held_out": case.held_out,
                "completions_per_update": case.completions,
                "learning_rate": case.learning_rate,
                "trainings": found,
                "paired": paired(found),
            }


def _train(run: Path, case: Case, arm: str, seed: int) -> dict[str, Any]:
    batch = case.completions // 2 if arm == HALVED else case.completions
    curriculum = case.arms[arm]
    _make_run(run, case, curriculum, seed, batch)
    if "probe" in curriculum:
        _python("grpo_core.probe", run)
    _python("grpo_core.train", run)
    return {"arm": arm, "seed": seed, **_outcome(run, batch)}


def _again(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text())
    return {**document, "paired": paired(document["trainings"])}


def paired(trainings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare each arm with the arm without a curriculum, by seed. Samples include the probe's.

    Differences in held-out reward: at the end, with Student's interval of 95 %, its two-sided p-value and that after
    Holm (1979) over the arms (null without spread or with one seed); on the mean over the training; and after as many
    samples as the arm without a curriculum takes in all. Samples until REACHED of the gain without a curriculum, from
    the first evaluation to the end, as a multiple of those that the arm without one needs for it (null: not reached).
    """
    by_arm = {(each["arm"], each["seed"]): each for each in trainings}
    found: list[dict[str, Any]] = []
    for arm in dict.fromkeys(each["arm"] for each in trainings):
        pairs = [
            (by_arm["none", seed], each)
            for (name, seed), each in by_arm.items()
            if name == arm != "none" and ("none", seed) in by_arm
        ]
        if not pairs:
            continue
        ends = [(_end(none), _end(each)) for none, each in pairs]
        means = [_mean(each) - _mean(none) for none, each in pairs]
        equal = [_after(none["curve"][-1][0], each) - none["curve"][-1][1] for none, each in pairs]
        ratios = []
        for none, each in pairs:
            first = none["curve"][0][1]
            needed, own = (_samples_to(first + REACHED * (_end(none) - first), it) for it in (none, each))
            ratios.append(own / needed if own and needed else None)
        end = seed_difference(*zip(*ends, strict=True), confidence=0.95)
        has_spread = not math.isnan(end.low)
        found.append(
            {
                "arm": arm,
                "more_at_the_end": [own - none for none, own in ends],
                "interval": [end.low, end.high] if has_spread else None,
                "p_value": 2 * min(end.p_value, 1 - end.p_value) if has_spread else None,
                "more_on_the_mean": means,
                "standard_error_of_that": _standard_error(means),
                "more_after_equal_samples": equal,
                "standard_error_after_equal_samples": _standard_error(equal),
                "times_the_samples": ratios,
            }
        )
    corrected = _holm([each["p_value"] for each in found])
    return [{**each, "p_value_after_holm": p_value} for each, p_value in zip(found, corrected, strict=True)]


def _holm(p_values: Sequence[float | None]) -> list[float | None]:
    """The p-values, corrected for their number by Holm's step-down method (1979)."""
    known = sorted((p_value, place) for place, p_value in enumerate(p_values) if p_value is not None)
    corrected: list[float | None] = [None] * len(p_values)
    most = 0.0
    for rank, (p_value, place) in enumerate(known):
        most = max(most, min(1.0, (len(known) - rank) * p_value))
        corrected[place] = most
    return corrected


def table(document: Mapping[str, Any]) -> str:
    """The comparison as a table of Markdown."""

    def trainings_of(arm: str) -> list[Mapping[str, Any]]:
        return [each for each in document["trainings"] if each["arm"] == arm]

    def silent(arm: str) -> str:
        return f"{mean(each['silent_groups'] for each in trainings_of(arm)):.0%}"

    lines = [
        "| curriculum | silent groups | held-out reward at the end | p after Holm | samples |",
        "|---|---|---|---|---|",
        f"| none | {silent('none')} | {mean(map(_end, trainings_of('none'))):.3f} | | 1 |",
    ]
    for each in document["paired"]:
        more, interval, p_value = mean(each["more_at_the_end"]), each["interval"], each["p_value_after_holm"]
        end = f"{more:+.3f}" + (f" ({interval[0]:+.3f} to {interval[1]:+.3f})" if interval else "")
        ratios = [ratio for ratio in each["times_the_samples"] if ratio is not None]
        samples = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
        if ratios and len(ratios) < len(each["times_the_samples"]):
            samples += f", {len(ratios)} of {len(each['times_the_samples'])} seeds"
        p_text = "" if p_value is None else f"{p_value:.2g}"
        lines.append(f"| {each['arm']} | {silent(each['arm'])} | {end} | {p_text} | {samples} |")
    return "\n".join(lines)


def _end(training: Mapping[str, Any]) -> float:
    return mean(reward for _, reward in training["curve"][-LAST:])


def _mean(training: Mapping[str, Any]) -> float:
    return mean(reward for _, reward in training["curve"])


def _after(samples: float, training: Mapping[str, Any]) -> float:
    """Held-out reward after `samples` samples, the probe's included, interpolated between two evaluations."""
    at, rewards = zip(*training["curve"], strict=True)
    return float(np.interp(samples - training["probed"], at, rewards))


def _samples_to(goal: float, training: Mapping[str, Any]) -> float | None:
    """Samples until the held-out reward first reaches the goal, interpolated between two evaluations; those of the
    first evaluation if that has reached it already."""
    curve = training["curve"]
    if curve[0][1] >= goal:
        return training["probed"] + curve[0][0]
    for (before, low), (after, high) in itertools.pairwise(curve):
        if high >= goal > low:
            return training["probed"] + before + (after - before) * (goal - low) / (high - low)
    return None


def _standard_error(values: Sequence[float]) -> float | None:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _make_run(run: Path, case: Case, curriculum: dict[str, Any], seed: int, batch: int) -> None:
    """Make a run directory as the stages validate and plan leave it."""
    recipe = tomllib.loads((ROOT / "configs" / "quickstart.toml").read_text())
    values = copy.deepcopy({key: value for key, value in recipe.items() if key not in ("promotion", "registry")})
    values["seed"] = seed
    values["data"]["curriculum"] = curriculum
    values["rollout"]["engine"] = "transformers"
    values["train"] |= {"max_steps": case.updates, "per_device_train_batch_size": batch, "warmup_steps": 3}
    values["train"] |= {"learning_rate": case.learning_rate}
    values["train"] |= {"eval_steps": case.updates // case.evaluations, "save_steps": 10_000}
    config = parse_config(values)
    (run / "dataset").mkdir(parents=True)
    for name, rows in (("train", case.prompts - case.out_of_reach), ("eval", case.held_out)):
        prompts = pl.read_parquet(values["data"][name]).head(rows)
        if name == "train":
            prompts = pl.concat([prompts, _other_sums(case.out_of_reach, case.digits)])
        prompts.write_parquet(run / "dataset" / f"{name}.parquet")
    (run / "config.toml").write_text(dump_config(config))
    (run / "plan.json").write_text(json.dumps({"plan": asdict(make_plan(plan_inputs(config, case.prompts)))}))


def _other_sums(count: int, digits: Sequence[int]) -> pl.DataFrame:
    """Sums of two numbers with one of these numbers of digits, equally many of each."""
    draw = random.Random(0)
    limits = [(10 ** (it - 1), 10**it - 1) for it in digits] * (count // len(digits))
    pairs = [(draw.randint(*limit), draw.randint(*limit)) for limit in limits]
    return pl.DataFrame({"prompt": [f"{a}+{b}=" for a, b in pairs], "answer": [str(a + b) for a, b in pairs]})


def _python(module: str, *arguments: object) -> None:
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


def _outcome(run: Path, batch: int) -> dict[str, Any]:
    rows = [json.loads(line) for line in (run / "training" / "metrics.jsonl").read_text().splitlines()]
    probe = run / "probe" / "pass_rates.parquet"
    return {
        "probed": int(pl.read_parquet(probe)["completions"].sum()) if probe.exists() else 0,
        "curve": [(row["step"] * batch, row["eval_reward"]) for row in rows if "eval_reward" in row],
        "silent_groups": mean(row["frac_reward_zero_std"] for row in rows),
        "seconds": round(sum(row["step_time"] for row in rows), 1),
    }


def draw(case: Case, document: Mapping[str, Any], path: Path) -> None:
    """Draw held-out reward over samples, mean over seeds; one standard error around the arm without a curriculum is
    shaded."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for arm in dict.fromkeys(each["arm"] for each in document["trainings"]):
        colour = COLOURS[arm]
        trainings = [each for each in document["trainings"] if each["arm"] == arm]
        curves = np.array([each["curve"] for each in trainings])  # (seeds, evaluations, 2)
        samples, rewards = curves[0, :, 0] + trainings[0]["probed"], curves[:, :, 1].mean(0)
        axes.plot(samples, rewards, color=colour, linewidth=2, label=arm)
        if arm == "none" and len(trainings) > 1:
            error = curves[:, :, 1].std(0, ddof=1) / math.sqrt(len(trainings))
            axes.fill_between(samples, rewards - error, rewards + error, color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="samples, the probe's included", ylabel="held-out reward")
    seeds = len({each["seed"] for each in document["trainings"]})
    axes.set_title(f"Sums, {case.title}: mean of {seeds} seeds", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
