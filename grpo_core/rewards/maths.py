"""The reward for mathematical answers: numbers and LaTeX, compared by math-verify.

What a model writes may keep sympy busy for ever or take all memory (9^9^9^9), in C code that no signal interrupts, and
math-verify's own time limits take the alarm that limits the reward. So answers are compared in a process of their own
(`maths_worker`), which loses its life, not the training's.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from grpo_core.rewards.answers import TAGGED
from grpo_core.rewards.basics import Rewards, text_of


def math_answer(
    completions: Sequence[Any], answer: Sequence[str | int | float], relative_tolerance: float = 0.0
) -> list[float | None]:
    """1 when the completion's final answer is mathematically equal to the answer, else 0; None where the answer is
    missing or cannot be read as mathematics.

    One answer is read, from the last `<answer>` if there is one: the content of the last `\\boxed{}` (several side by
    side are one set), else what follows "the answer is", else the last line, expression or number. Two decimals are
    equal when they differ by at most 1e-6, and by 1 in 20,000; a decimal and a number that no decimal writes out (pi,
    1/3) by 1 in 20,000; numbers without a decimal point only when exactly equal. `relative_tolerance` allows any two
    real numbers to differ by this share of the right one. Words, dates, times and numbers with a base are compared as
    they are written. An answer that takes more than 2 s of CPU time or 2 GiB is wrong. Raises RuntimeError if the
    process that compares cannot be started.
    """
    worker = _worker()
    pairs = [
        None if expected is None else (_answer_in(text_of(completion)), str(expected))
        for completion, expected in zip(completions, answer, strict=True)
    ]
    try:  # each pair once: what takes its 2 s is often what a policy says again and again
        compared = {pair: _compared(worker, *pair, relative_tolerance) for pair in dict.fromkeys(pairs) if pair}
    except BaseException:  # an answer may be under way, which is nobody's then
        _worker.cache_clear()
        worker.kill()
        worker.wait()
        raise
    return [compared[pair] if pair else None for pair in pairs]


def _answer_in(text: str) -> str:
    """Without its surroundings, whose numbers math-verify may prefer to one between tags."""
    return (TAGGED.findall(text) or [text])[-1]


def _compared(worker: subprocess.Popen[str], text: str, answer: str, tolerance: float) -> float | None:
    assert worker.stdin and worker.stdout
    worker.stdin.write(json.dumps([text, answer, tolerance]) + "\n")
    worker.stdin.flush()
    verdict = worker.stdout.readline()
    if not verdict:
        raise RuntimeError(
            f"the process that compares answers ended with exit code {worker.wait()}; its output says why"
        )
    return json.loads(verdict)


@functools.cache
def _worker() -> subprocess.Popen[str]:
    """A process that ends when this one does: its input is closed then."""
    command = [sys.executable, "-P", "-m", "grpo_core.rewards.maths_worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


REWARDS: Rewards = {"math_answer": (math_answer, (0.0, 1.0))}
