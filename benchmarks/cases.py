"""What is compared, what counts as met, and what would be better still."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import mean, median
from typing import Any

from benchmarks.workload import Workload

THRESHOLD = 0.5  # mean reward of WINDOW steps in a row
WINDOW = 5


def seconds(run: dict[str, Any]) -> float:
    """Median time of a step."""
    return median(run["seconds"])


def memory(run: dict[str, Any]) -> float:
    """What the training phase adds to the loaded model and libraries, in MiB."""
    return run["peak_mib"] - run["before_mib"]


def seconds_to_threshold(run: dict[str, Any]) -> float:
    """Wall time, from the first step on, after which the mean reward of WINDOW steps is at the threshold."""
    rewards = [step["reward"] for step in run["metrics"] if "reward" in step]
    for step, total in enumerate(itertools.accumulate(run["seconds"]), start=1):
        if step >= WINDOW and mean(rewards[step - WINDOW : step]) >= THRESHOLD:
            return total
    return float("inf")


@dataclass(frozen=True)
class Case:
    """`gates` and `goals`: how many times ours TRL's figure has to be, by TRL's side."""

    name: str
    about: str
    workload: Workload
    gates: dict[str, float] = field(default_factory=dict)
    goals: dict[str, float] = field(default_factory=dict)
    measure: Callable[[dict[str, Any]], float] = seconds
    unit: str = "s a step"
    turns: int = 2  # there and back; each is a seed of its own


def _sides(default: float, tuned: float) -> dict[str, float]:
    return {"TRL default": default, "TRL tuned": tuned}


SMALL = Workload()  # 5.8 million parameters
TINY = Workload(task="sums", mode="generate", prompts=64, completion=6, steps=12, warm_up=3)  # 0.8 million
GENERATE = replace(SMALL, mode="generate")
LONG_PROMPTS = replace(SMALL, prompt_lengths=(512, 512), completion=64)
LARGE_VOCABULARY = Workload(
    hidden=128, intermediate=384, layers=2, vocabulary=151_936, prompts=8, prompt_lengths=(16, 64), completion=64
)

GATED = [
    Case("tiny", "0.8M, end to end, natural lengths", TINY, _sides(2, 1.4), _sides(3, 2)),
    Case("small", "5.8M, end to end", GENERATE, _sides(2.5, 2), _sides(5, 4)),
    Case("training", "5.8M, training phase", SMALL, _sides(2.5, 2), _sides(4, 3)),
    Case("half-silent", "half of the groups without signal", replace(SMALL, silent=0.5), _sides(4, 3), _sides(7, 5)),
    Case("long-prompts", "prompts 8× the completions", LONG_PROMPTS, _sides(4, 3), _sides(7, 5)),
    Case("memory", "peak memory, V = 152k", LARGE_VOCABULARY, {"TRL tuned": 1}, {"TRL tuned": 1 / 0.6}, memory, "MiB"),
    Case(
        "threshold",
        f"seconds to a mean reward of {THRESHOLD}",
        replace(TINY, steps=40, warm_up=0),
        {"TRL default": 1.3, "TRL tuned": 1.3},
        _sides(3, 2),
        seconds_to_threshold,
        "s",
        turns=3,
    ),
]

SWEEPS = [
    *(
        Case(f"completion-{tokens}", f"completions of up to {tokens}", replace(SMALL, completion=tokens))
        for tokens in (32, 256, 512)
    ),
    *(
        Case(f"prompt-{tokens}", f"prompts of {tokens}", replace(LONG_PROMPTS, prompt_lengths=(tokens, tokens)))
        for tokens in (64, 256, 1024)
    ),
    *(
        Case(f"group-{size}", f"groups of {size}", replace(SMALL, group=size, prompts=64 // size))
        for size in (4, 16, 32)
    ),
    *(
        Case(f"vocabulary-{size}", f"V = {size}", replace(SMALL, vocabulary=size, prompts=4))
        for size in (1024, 16384, 65536)
    ),
    *(
        Case(f"silent-{share}", f"{share:.0%} of the groups without signal", replace(SMALL, silent=share))
        for share in (0.25, 0.75)
    ),
]

CASES = GATED + SWEEPS
