"""Tasks of reasoning-gym: made from a seed, checked by the task's own verifier."""

from __future__ import annotations

import random
from typing import Any

try:
    import reasoning_gym
except ImportError as error:
    raise ImportError("install it: pip install 'grpo-flows[reasoning-gym]'") from error


class ReasoningGym:
    """One task per conversation. `dataset`: the kind of task (`leg_counting`, …); `options`: of that kind. A row's
    columns `dataset` and `seed` take precedence; without a seed, the task follows from the row's number."""

    def __init__(self, dataset: str = "", options: dict[str, Any] | None = None) -> None:
        self.dataset, self.options = dataset, options or {}

    def reset(self, dataset: str | None = None, seed: int | None = None, **row: Any) -> str:
        """The task's question."""
        seed = random.randrange(2**31) if seed is None else seed
        self.tasks = reasoning_gym.create_dataset(dataset or self.dataset, seed=seed, size=1, **self.options)
        self.task = self.tasks[0]
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
        """The verdict of the task's verifier: 1 for a right answer, 0 without one."""
        return 0.0 if self.answered is None else float(self.tasks.score_answer(self.answered, self.task))
