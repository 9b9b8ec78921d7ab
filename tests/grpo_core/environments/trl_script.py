"""A script as TRL's documentation has them: an environment, tools and reward functions. It knows nothing of this
project, and lacks only the call of the trainer."""

import asyncio
from typing import Literal, Optional


class WordEnv:
    """Guess a word of five letters."""

    def __init__(self):
        self.games = 0

    def reset(self, **kwargs) -> str | None:
        self.games += 1
        self.word = kwargs["word"]
        self.guesses = []
        self.reward = 0.0
        self.done = False
        return f"\nThe word has {len(self.word)} letters."

    def guess(self, word: str) -> str:
        """
        Make a guess.

        Args:
            word: The guessed word, in lower case,
                without brackets.

        Returns:
            One letter per position: G for green, Y for yellow, X for none.
        """
        if self.done:
            raise ValueError("Game over.")
        if len(word) != len(self.word):
            raise ValueError(f"The word must have {len(self.word)} letters.")
        self.guesses.append(word)
        self.done = word == self.word
        self.reward = 1.0 / len(self.guesses) if self.done else 0.0
        return "".join(
            "G" if letter == right else "Y" if letter in self.word else "X"
            for letter, right in zip(word, self.word)  # noqa: B905
        )

    async def hint(self, position: int, case: Literal["lower", "upper"] = "lower", prefix: Optional[str] = None) -> str:  # noqa: UP045
        """
        Tells one letter.

        Args:
            position: Counted from 0.
            case: How to write it. (choices: ["lower", "upper"])
            prefix: What to write before it.

        Returns:
            The letter.
        """
        await asyncio.sleep(0)
        return (prefix or "") + getattr(self.word[position], case)()

    def left(self) -> int:
        """
        Counts the guesses that are left.

        Returns:
            The number.
        """
        return 6 - len(self.guesses)

    def letters(self) -> list[str]:
        """
        Lists the letters that have been tried.
        """
        return sorted(set("".join(self.guesses)))

    def _secret(self):
        return self.word


class RewardingEnv(WordEnv):
    """The same, with a reward of its own."""

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return self.reward


def make_env(most_guesses: int):
    """Most of TRL's scripts have their class in a function, over whose arguments it closes."""

    class Env(RewardingEnv):
        def left(self) -> int:
            """
            Counts the guesses that are left.
            """
            return most_guesses - len(self.guesses)

    return Env()


def multiply(a: float, b: float) -> float:
    """
    Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        Their product.
    """
    return a * b


async def later(text: str) -> dict[str, str]:
    """
    Answers later.

    Args:
        text: What to answer.

    Returns:
        The answer.
    """
    await asyncio.sleep(0)
    return {"said": text}


def reward_func(environments, **kwargs) -> list[float]:
    return [environment.reward for environment in environments]


async def brevity_reward(completions, environments, word, **kwargs):
    assert [environment._word if hasattr(environment, "_word") else None for environment in environments] == [
        None for _ in word
    ]
    return [
        None if len(completion) == 0 else -float(len(environment.guesses) + environment.left() - 6)
        for completion, environment in zip(completions, environments)  # noqa: B905
    ]


def tool_reward(completions, **kwargs) -> list[float]:
    return [float(sum(message["role"] == "tool" for message in completion)) for completion in completions]
