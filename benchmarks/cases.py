"""The cases of the comparison with TRL, with the ratio that each has to reach (gate), and a better one to aim at
(goal)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import mean, median
from typing import Any, Literal

from benchmarks.workload import Workload

THRESHOLD = 0.4  # mean reward of WINDOW consecutive steps; 0.24 at the start
WINDOW = 5


def seconds(run: dict[str, Any]) -> float:
    """Median time of a step."""
    return median(run["seconds"])


def memory(run: dict[str, Any]) -> float:
    """Memory that the training phase adds to the loaded model and libraries, in MiB, which is what is counted."""
    return max(run["peak_mib"] - run["before_mib"], 1)


def seconds_to_threshold(run: dict[str, Any], threshold: float = THRESHOLD, window: int = WINDOW) -> float:
    """Wall time from the first step until the mean reward of `window` steps reaches the threshold."""
    rewards = [step["reward"] for step in run["metrics"] if "reward" in step]
    for step, total in enumerate(itertools.accumulate(run["seconds"]), start=1):
        if step >= window and mean(rewards[step - window : step]) >= threshold:
            return total
    return float("inf")


@dataclass(frozen=True)
class Case:
    """A case of the comparison. `gates`, `goals`: ratio of TRL's figure to ours to be reached, by TRL's side."""

    name: str
    about: str
    workload: Workload
    gates: dict[str, float] = field(default_factory=dict)
    goals: dict[str, float] = field(default_factory=dict)
    measure: Callable[[dict[str, Any]], float] = seconds
    unit: str = "s a step"
    turns: int = 2  # there and back, each with another seed
    engine: Literal["transformers", "vllm"] = "transformers"  # samples on both sides


def _sides(default: float, tuned: float) -> dict[str, float]:
    return {"TRL default": default, "TRL tuned": tuned}


SMALL = Workload()  # 5.8 million parameters
TINY = Workload(task="sums", mode="generate", prompts=64, completion=6, steps=12, warm_up=3)  # 0.8 million
GENERATE = replace(SMALL, mode="generate")
LONG_PROMPTS = replace(SMALL, prompt_lengths=(512, 512), completion=64)
LARGE_VOCABULARY = Workload(
    hidden=128,
    intermediate=384,
    layers=2,
    vocabulary=151_936,
    prompts=4,
    prompt_lengths=(16, 64),
    completion=64,
    steps=2,
)

GATED = [
    Case("tiny", "0.8M, end to end, natural lengths", TINY, _sides(2, 1.4), _sides(9, 3)),
    Case("small", "5.8M, end to end", GENERATE, _sides(2.5, 2), _sides(5, 5)),
    Case("training", "5.8M, training phase", SMALL, _sides(2.5, 2), _sides(8, 8)),
    Case(
        "half-silent",
        "training phase, half of the groups silent",
        replace(SMALL, silent=0.5),
        _sides(4, 3),
        _sides(7, 5),
    ),
    Case("long-prompts", "training phase, prompts 8× the completions", LONG_PROMPTS, _sides(4, 3), _sides(7, 5)),
    Case("memory", "peak memory, V = 152k", LARGE_VOCABULARY, {"TRL tuned": 1}, {"TRL tuned": 1 / 0.6}, memory, "MiB"),
    Case(
        "threshold",
        f"seconds to a mean reward of {THRESHOLD}",
        replace(TINY, steps=60, warm_up=0),
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

QWEN: dict[str, dict[str, Any]] = {  # the shapes of Qwen2.5, random weights
    "0.5B": {"hidden": 896, "intermediate": 4864, "layers": 24, "heads": 14, "kv_heads": 2, "vocabulary": 151_936},
    "1.5B": {"hidden": 1536, "intermediate": 8960, "layers": 28, "heads": 12, "kv_heads": 2, "vocabulary": 151_936},
    "3B": {"hidden": 2048, "intermediate": 11_008, "layers": 36, "heads": 16, "kv_heads": 2, "vocabulary": 151_936},
    "7B": {"hidden": 3584, "intermediate": 18_944, "layers": 28, "heads": 28, "kv_heads": 4, "vocabulary": 152_064},
}
WORD_PROBLEMS: dict[str, Any] = {"prompts": 32, "prompt_lengths": (60, 220), "completion": 512}  # as in GSM8K


def _gpu(name: str, about: str, shape: str, gates: dict[str, float], goals: dict[str, float], **keys: Any) -> Case:
    return Case(f"gpu-{name}", f"{shape}, {about}", Workload(**QWEN[shape], **WORD_PROBLEMS | keys), gates, goals)


GPU = [
    *(_gpu(f"training-{shape}", "training phase", shape, _sides(2.5, 1.7), _sides(4, 2.5)) for shape in QWEN),
    _gpu(
        "long-prompts",
        "prompts of 3000, completions of 200",
        "0.5B",
        _sides(5, 3),
        _sides(9, 5),
        prompts=8,
        prompt_lengths=(3000, 3000),
        completion=200,
    ),
    _gpu("end-to-end", "end to end, TRL's own generate", "0.5B", _sides(3, 3), _sides(6, 6), mode="generate"),
    replace(
        _gpu("vllm", "end to end, both with vLLM", "0.5B", {"TRL tuned": 1.5}, {"TRL tuned": 2.5}, mode="generate"),
        engine="vllm",
    ),
]


def tiny(workload: Workload) -> Workload:
    """Make a workload so small that a CPU does it in seconds."""
    shape: dict[str, Any] = {"hidden": 64, "intermediate": 128, "layers": 2, "heads": 2, "kv_heads": 1}
    sizes: dict[str, Any] = {"prompts": 2, "prompt_lengths": (5, 12), "completion": 16, "steps": 2, "warm_up": 1}
    return replace(workload, vocabulary=1024, **shape, **sizes)


def cut_down(case: Case) -> Case:
    """Make a case so small that it shows only that it runs."""
    measure = case.measure
    if measure is seconds_to_threshold:
        measure = partial(seconds_to_threshold, threshold=0.0, window=1)
    return replace(case, workload=tiny(case.workload), measure=measure, engine="transformers", turns=1)


CASES = GATED + SWEEPS + GPU
