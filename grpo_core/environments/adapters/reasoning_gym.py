"""Tasks of reasoning-gym: made from a seed, checked by the task's own verifier in the sandbox, since many verifiers
evaluate the answer as Python."""

from __future__ import annotations

import random
from typing import Any

from grpo_core.errors import install
from grpo_core.system.sandbox.verifier import NoVerdictError, Verifier

try:
    import reasoning_gym
except ImportError as error:
    raise ImportError(f"install it: {install('reasoning-gym')}") from error

# One of its packages imports matplotlib, to draw, which takes a second and wants to write.
SOURCE = """
import sys, unittest.mock
for name in ("", ".animation", ".collections", ".pyplot"):
    sys.modules["matplotlib" + name] = unittest.mock.MagicMock()
sys.modules |= {"mpl_toolkits.mplot3d": unittest.mock.MagicMock()}
import reasoning_gym

def judge(dataset, seed, options, answer, task):
    return reasoning_gym.create_dataset(dataset, seed=seed, size=1, **options).score_answer(answer, task)
"""
VERIFIER = Verifier(SOURCE)


class ReasoningGym:
    """One task per conversation. `dataset`: the kind of task (`leg_counting`, …); `options`: of that kind. A row's
    columns `dataset` and `seed` take precedence; without a seed, the task follows from the row's number."""

    def __init__(self, dataset: str = "", options: dict[str, Any] | None = None) -> None:
        self.dataset, self.options = dataset, options or {}

    def reset(self, dataset: str | None = None, seed: int | None = None, **row: Any) -> str:
        """The task's question."""
        seed = random.randrange(2**31) if seed is None else seed
        self.made = {"dataset": dataset or self.dataset, "seed": seed, "options": self.options}
        self.task = reasoning_gym.create_dataset(self.made["dataset"], seed=seed, size=1, **self.options)[0]
        self.answered: str | None = None
        return f"\n{self.task['question']}"

    def answer(self, text: str) -> str:
        """Hands in the answer. Only the first one counts.

        Args:
            text: The answer alone, in the form that the question asks for.
        """
        if self.answered is not None:
            raise ValueError("an answer has been handed in already")
        self.answered = text
        return "Handed in."

    def get_reward(self) -> float:
        """The verdict of the task's verifier: 1 for a right answer, 0 without one. Raises NoVerdictError if there is no
        verdict, or one outside of 0 to 1."""
        if self.answered is None:
            return 0.0
        score = VERIFIER.score(**self.made, answer=self.answered, task=self.task)
        if not 0 <= score <= 1:
            raise NoVerdictError(f"the verifier gave {score}, and verdicts are from 0 to 1")
        return score
