"""Environments and tools of the tests. They import little: their processes start quickly."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any


class Counting:
    """An environment that counts; it begins at a random number and, for the row's answer, gives a reward."""

    def reset(self, answer: str = "", **row: Any) -> str:
        self.answer, self.count, self.path = answer, random.randrange(1000), row.get("path", "")
        drawn = os.urandom(9) if row.get("unseeded") else b""
        return f" from {self.count}{drawn[:8].hex()}" + "x" * sum(drawn[8:])

    def add(self, number: int) -> str:
        """Adds to the count.

        Args:
            number: What to add.
        """
        self.count += number
        return f"now {self.count}"

    async def later(self) -> str:
        """Says the count later."""
        return f"later {self.count}"

    def wait_for_file(self) -> str:
        """Waits until the row's file is there."""
        while not Path(self.path).exists():
            time.sleep(0.01)
        return "there"

    def fail(self) -> str:
        """Raises."""
        raise ValueError("no such thing")

    def number(self) -> int:
        """Returns a number."""
        return 7

    def object(self) -> object:
        """Returns what is no text."""
        return object()

    def megabyte(self) -> str:
        """Returns a megabyte."""
        return "x" * 2**20

    def hang(self) -> str:
        """Never returns."""
        time.sleep(1000)
        return ""

    def die(self) -> str:
        """Ends its process."""
        os._exit(3)

    def get_reward(self) -> float:
        return float(str(self.count) == self.answer)


class Endless:
    """An environment without tools that never begins."""

    def reset(self, **row: Any) -> None:
        time.sleep(1000)


class CannotJudge:
    """An environment without tools whose reward raises."""

    def reset(self, **row: Any) -> None:
        pass

    def get_reward(self) -> float:
        return float(int("zzz"))


class Dice:
    """An environment with randomness, from its beginning and in each call."""

    def reset(self, **row: Any) -> str:
        self.faces, self.total = random.randrange(4, 20), 0
        return f" with {self.faces}"

    def roll(self, times: int) -> str:
        """Rolls dice.

        Args:
            times: How many.
        """
        rolled = [random.randrange(self.faces) for _ in range(times)]
        self.total += sum(rolled)
        return " ".join(map(str, rolled))

    def get_reward(self) -> float:
        return float(self.total > 15)


def echo(text: str) -> str:
    """Says what it is told.

    Args:
        text: The text.
    """
    return text


def hang() -> str:
    """Never returns."""
    time.sleep(1000)
    return ""
