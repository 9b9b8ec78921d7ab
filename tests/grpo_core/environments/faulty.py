"""Environments and tools of which each has one fault, for the rehearsal."""

from __future__ import annotations

import os
import random
import time
from enum import Enum
from typing import Any


class Sound:
    """Says a number, and what is told; its reward is what was told last."""

    def reset(self, **row: Any) -> str:
        self.told = 0
        return f" {random.randrange(10**6)}"

    def tell(self, number: int, times: int = 1) -> str:
        """Tells a number.

        Args:
            number: The number.
            times: How often.
        """
        self.told = number
        return f"told {number}" * times

    def get_reward(self) -> float | None:
        return float(self.told)


class RaisesInReset(Sound):
    def reset(self, **row: Any) -> str:
        raise KeyError("board")


class ReturnsNumber(Sound):
    def reset(self, **row: Any) -> int:  # type: ignore[override]
        return 3


class Carries(Sound):
    """Keeps something from one conversation to the next."""

    before = 0

    def reset(self, **row: Any) -> str:
        self.told, self.before = 0, self.before + 1
        return f" {self.before}"


class Hashes(Sound):
    """Depends on the hashes of texts, which differ between processes."""

    def reset(self, **row: Any) -> str:
        self.told = 0
        return f" {min({str(number) for number in range(1000)}, key=hash)}"


class Talks(Sound):
    def reset(self, **row: Any) -> str:
        self.told = 0
        return "so " * 2000


class Answers(Sound):
    def tell(self, number: int) -> str:  # type: ignore[override]
        """Tells much.

        Args:
            number: How much.
        """
        return "so " * 200


class Hangs(Sound):
    def tell(self, number: int) -> str:  # type: ignore[override]
        """Hangs.

        Args:
            number: The number.
        """
        time.sleep(1000)
        return ""


class Ends(Sound):
    def tell(self) -> str:  # type: ignore[override]
        """Ends its process."""
        os._exit(1)


class NoText(Sound):
    def tell(self) -> object:  # type: ignore[override]
        """Returns what is no text."""
        return object()


class Refuses(Sound):
    def tell(self, number: int) -> str:  # type: ignore[override]
        """Refuses.

        Args:
            number: The number.
        """
        raise ValueError("a number from 2 to 9")


class Silent:
    """Has a tool for its author alone: the policy sees no class methods."""

    def reset(self, **row: Any) -> None: ...

    @classmethod
    def tell(cls, number: int) -> str:
        """Tells a number.

        Args:
            number: The number.
        """
        return str(number)

    def get_reward(self) -> float:
        return 1.0


class Side(Enum):
    LEFT = "left"


class Vague:
    def reset(self, **row: Any) -> None: ...

    def go(self, side: Side, steps: dict[str, int], others: list[Side]) -> str:
        """Goes.

        Args:
            side: Where to.
            steps: How far.
            others: And then.
        """
        return f"{side} {steps} {others}"

    def get_reward(self) -> float:
        return 1.0


class Starred:
    def reset(self, **row: Any) -> None: ...

    def go(self, **kwargs: int) -> str:
        """Goes.

        Args:
            kwargs: Where to.
        """
        return str(kwargs)


class NoNumber(Sound):
    def get_reward(self) -> str:  # type: ignore[override]
        return "much"


class Slow(Sound):
    def reset(self, **row: Any) -> str:
        self.told = 0
        time.sleep(0.1)
        return " slowly"


def told(completions: list[Any], environments: list[Any]) -> list[float]:
    """Reads an attribute of the environments, and calls a method."""
    return [each.told + len(each.tell(2)) for each in environments]
