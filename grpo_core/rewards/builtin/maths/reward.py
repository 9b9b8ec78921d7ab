"""The reward for mathematical answers: numbers and LaTeX, compared by math-verify.

An answer may keep sympy busy forever or take all memory (9^9^9^9), in C code that no signal interrupts, and
math-verify's own time limits use the alarm that limits the reward. So answers are compared in a separate process
(`worker`): if one goes wrong, that process ends, not the training.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from grpo_core.data.chat import text_of
from grpo_core.rewards.builtin.answers import TAGGED
from grpo_core.rewards.builtin.record import BuiltinReward, Rewards, written

SECONDS = 2.0  # of CPU time per answer
FAIR_SECONDS = 0.1  # of CPU time that every answer of a batch gets
SPARE_SECONDS = 20.0  # that the answers of a batch may take together beyond FAIR_SECONDS each


def math_answer(
    completions: Sequence[Any], answer: Sequence[str | int | float], relative_tolerance: float = 0.0
) -> list[float | None]:
    """1 if the completion's final answer is mathematically equal to the answer, else 0; None if the answer is missing
    or cannot be read as mathematics.

    Only the text after the last `</think>` is read, and of it the last `<answer>` if there is one. The answer is the
    content of the last `\\boxed{}` (several side by side are one set), else what follows "the answer is", else the last
    line, expression or number.

    Two decimals are equal if they differ by at most 1e-6 and at most 1 in 20,000; a decimal and a number that no
    decimal writes out (pi, 1/3), if they differ by at most 1 in 20,000; numbers without a decimal point, only if
    exactly equal. `relative_tolerance` allows any two real numbers to differ by this share of the right one. Words,
    dates, times and numbers with a base are compared as they are written.

    An answer that takes more than 2 s of CPU time or 2 GiB is wrong, as is one that takes more than 0.1 s after such
    slow answers of the batch have taken 20 s. Raises RuntimeError if the process that compares cannot be started.
    """
    worker = _worker()
    pairs = [
        None if expected is None else (_answer_in(text_of(completion)), written(expected))
        for completion, expected in zip(completions, answer, strict=True)
    ]
    try:  # each pair once: slow answers are often repeated ones
        compared, spare = {}, SPARE_SECONDS
        for pair in dict.fromkeys(filter(None, pairs)):
            limit = min(SECONDS, FAIR_SECONDS + spare)
            compared[pair], taken = _compare(worker, *pair, relative_tolerance, limit)
            spare = max(0.0, spare - max(0.0, min(taken, limit) - FAIR_SECONDS))
    except BaseException:  # an answer that is still under way would be read as the next one's
        _worker.cache_clear()
        worker.kill()
        worker.wait()
        raise
    return [compared[pair] if pair else None for pair in pairs]


def _answer_in(text: str) -> str:
    """The part of the text that holds the answer: outside of it, math-verify could find other numbers."""
    text = text.rpartition("</think>")[2]
    return (TAGGED.findall(text) or [text])[-1]


def _compare(
    worker: subprocess.Popen[str], text: str, answer: str, tolerance: float, limit: float
) -> tuple[float | None, float]:
    """The verdict and the CPU time that it took at most; 0.0 if it would take longer than `limit` seconds."""
    assert worker.stdin and worker.stdout
    worker.stdin.write(json.dumps([limit, text, answer, tolerance]) + "\n")
    worker.stdin.flush()
    verdict = worker.stdout.readline()
    if not verdict:
        raise RuntimeError(
            f"the process that compares answers ended with exit code {worker.wait()}; its output says why"
        )
    return tuple(json.loads(verdict))


@functools.cache
def _worker() -> subprocess.Popen[str]:
    """Start the process that compares. It ends with this one, whose end closes its input."""
    command = [sys.executable, "-P", "-m", "grpo_core.rewards.builtin.maths.worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


REWARDS: Rewards = {
    "math_answer": BuiltinReward(
        math_answer,
        (0.0, 1.0),
        looks_at_text_only=True,
        looks_for=lambda _: "</think> <answer> </answer>",
        extra="rewards",
        modules=("math_verify", "sympy"),
    )
}
