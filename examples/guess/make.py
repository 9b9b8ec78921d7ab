"""Games of guessing a number from 1 to 7, and a base model that searches well in half of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples import tiny
from examples.guess.game import MOST_GUESSES, Guess

TRAIN_ROWS, EVAL_ROWS, DEMONSTRATIONS = 770, 210, 4000
STEPS, CONTEXT = 150, 320
LOWEST, HIGHEST = 1, 7
SENSIBLE = 0.5  # share of the demonstrated games that are binary searches; in the others, guesses are any numbers

Choose = Callable[[int, int], int]  # a guess, by the least and the greatest number that are left


def make_rows(seed: int = tiny.SEED) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out games, with numbers that say nothing about the secret; in both, each secret is as frequent
    as any other."""
    rng = random.Random(seed)
    games = rng.sample(range(100, 100 + TRAIN_ROWS + EVAL_ROWS), TRAIN_ROWS + EVAL_ROWS)
    rows = [make_row(game, 1 + place % HIGHEST) for place, game in enumerate(games)]
    return rows[EVAL_ROWS:], rows[:EVAL_ROWS]


def make_row(game: int, secret: int) -> dict[str, Any]:
    columns = {"secret": secret, "low": LOWEST, "high": HIGHEST}
    return {"prompt": [{"role": "user", "content": f"Game {game}: {LOWEST} to {HIGHEST}"}], **columns}


def play(secret: int, choose: Choose) -> list[tuple[int, str]]:
    """The guesses of a game and their answers."""
    game = Guess()
    game.reset(secret, LOWEST, HIGHEST)
    said: list[tuple[int, str]] = []
    while not game.is_found and len(said) < MOST_GUESSES:
        number = choose(game.low, game.high)
        said.append((number, game.guess(number)))
    return said


def middle(low: int, high: int) -> int:
    """The optimal strategy: binary search."""
    return (low + high) // 2


def anything(rng: random.Random) -> Choose:
    return lambda low, high: rng.randint(LOWEST, HIGHEST)


def demonstrate(secret: int, rng: random.Random) -> list[tiny.Message]:
    turns: list[tiny.Message] = []
    for number, answer in play(secret, middle if rng.random() < SENSIBLE else anything(rng)):
        turns += [tiny.call("guess", number=number), tiny.answer(answer)]
    return [*turns, tiny.say("Done.")]


def make(folder: Path) -> None:
    train, held = make_rows()
    tiny.write_rows(folder, train, held)
    rng = random.Random(tiny.SEED)
    rows = [rng.choice(train) for _ in range(DEMONSTRATIONS)]
    demonstrations = [(row["prompt"], demonstrate(row["secret"], rng)) for row in rows]
    tiny.make_base(folder / "base", demonstrations, STEPS, CONTEXT)


if __name__ == "__main__":
    tiny.run(__file__, make)
