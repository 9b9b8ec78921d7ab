"""The game of this recipe: find a number by guesses that are answered "higher" or "lower"."""

from __future__ import annotations

MOST_GUESSES = 4


class Guess:
    def __init__(self, most_guesses: int = MOST_GUESSES) -> None:
        self.most = most_guesses

    def reset(self, secret: int, low: int, high: int, **columns: object) -> None:
        self.secret, self.low, self.high = secret, low, high
        self.guesses, self.is_found = 0, False

    def guess(self, number: int) -> str:
        """Guesses the number. Answers whether it is higher or lower, and what is left.

        Args:
            number: A whole number.
        """
        if self.is_found or self.guesses == self.most:
            raise ValueError("the game is over")
        self.guesses += 1
        self.is_found = number == self.secret
        if self.is_found:
            return "right"
        if number < self.secret:
            self.low = max(self.low, number + 1)
            return f"higher: {self.low} to {self.high}"
        self.high = min(self.high, number - 1)
        return f"lower: {self.low} to {self.high}"

    def get_reward(self) -> float:
        """1 for the number at the first guess, less by 1 / most_guesses for each further one; 0 if it is not found."""
        return 1 - (self.guesses - 1) / self.most if self.is_found else 0.0
