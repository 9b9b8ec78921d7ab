"""Prompts for stories, a base model that has a favourite story, and a small judge that grades them.

The base writes a story of its own now and then; more often the same one, a sentence over and over, or one without an
end. The judge is a language model too, taught to grade by what a story has: a beginning, something that happens, an
end.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from examples import tiny
from grpo_core.rewards.builtin.judge import QUESTION

TRAIN_ROWS, EVAL_ROWS = 400, 60
TOLD = 8  # demonstrations of each training prompt
STEPS, JUDGE_STEPS = 150, 300
GARBLED = 0.4  # share of the stories that the judge learns from
OWN, FAVOURITE = 0.3, 0.3  # shares of the demonstrations that are a story of its own, and the favourite one
SCALE = (1, 5)
RUBRIC = "Grade the story: has it a beginning, something that happens, and an end?\n\nStory:\n{completion}"
WHO = (
    "baker",
    "bear",
    "cat",
    "clown",
    "crow",
    "fox",
    "ghost",
    "girl",
    "king",
    "mouse",
    "owl",
    "queen",
    "robot",
    "sailor",
)
WHAT = ("apple", "bell", "boat", "book", "clock", "coin", "drum", "hat", "key", "kite", "lamp", "map", "mirror", "shoe")
WHERE = ("by the sea", "in a forest", "in a tower", "on a hill", "under a bridge")
BEGINNINGS = (
    "Once upon a time there was a {who}.",
    "A {who} lived all alone.",
    "Nobody had ever seen a {who} here before.",
    "It was winter, and the {who} was cold.",
    "Every night the {who} looked at the moon.",
    "The {who} could not sleep.",
)
EVENTS = (
    "One day the {what} began to sing.",
    "Then the wind took the {what} away.",
    "The {what} was broken, so it had to be mended.",
    "A thief came to steal the {what}.",
    "Inside the {what} was a letter.",
    "The {what} fell into deep water.",
    "A stranger asked for the {what}.",
    "Suddenly the {what} was made of gold.",
)
ENDS = (
    "They lived happily ever after.",
    "And the {who} never told anyone.",
    "Since then it has been quiet.",
    "In the morning the {who} was gone.",
    "So the {who} went home at last.",
)

Row = dict[str, str]


def make_rows(seed: int = tiny.SEED) -> tuple[list[Row], list[Row]]:
    """Training and held-out prompts, no two alike."""
    rng = random.Random(seed)
    rows = [
        {"prompt": f"Write a story of a {who} and a {what} {where}.\n", "who": who, "what": what}
        for who in WHO
        for what in WHAT
        for where in WHERE
    ]
    rng.shuffle(rows)
    return rows[EVAL_ROWS : EVAL_ROWS + TRAIN_ROWS], rows[:EVAL_ROWS]


def tell(rng: random.Random) -> list[str]:
    """What the base learns to say: a story of its own, the favourite one, one sentence over and over, or no end."""
    kind = rng.random()
    if kind < OWN:
        return [rng.choice(BEGINNINGS), *rng.sample(EVENTS, rng.choice((1, 2, 2))), rng.choice(ENDS)]
    if kind < OWN + FAVOURITE:
        return [BEGINNINGS[0], EVENTS[0], ENDS[0]]
    event = rng.choice(EVENTS)
    return rng.choice(([event] * rng.randint(2, 4), [rng.choice(BEGINNINGS), event], [rng.choice(BEGINNINGS)]))


def anything(rng: random.Random) -> list[str]:
    """What the judge learns from: what the base says, and sentences in any number, in any order."""
    if rng.random() < 0.5:
        return tell(rng)
    some = [*rng.choices(BEGINNINGS, k=rng.randint(0, 1)), *rng.choices(EVENTS, k=rng.randint(0, 3))]
    some += rng.choices(ENDS, k=rng.randint(0, 1))
    if rng.random() < 0.2:
        rng.shuffle(some)
    return some or [rng.choice(EVENTS)]


def grade(sentences: Sequence[str]) -> int:
    """What they deserve: a point each for beginning and ending as a story does, one or two for what happens."""
    happens = len({*sentences} & {*EVENTS})
    return SCALE[0] + (sentences[0] in BEGINNINGS) + (sentences[-1] in ENDS) + min(happens, 2)


def garble(story: str, rng: random.Random) -> str:
    """The story with some pieces of it gone or somewhere else too: what a policy says that has lost its language."""
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        length, start, place = rng.randint(2, 8), rng.randrange(len(story)), rng.randrange(len(story))
        piece = story[start : start + length]
        twice = story[:place] + piece + story[place:]
        story = twice if rng.random() < 0.5 else story.replace(piece, "", 1) or story
    return story


def say(sentences: Sequence[str], row: Row) -> str:
    return " ".join(sentences).format(**row)


def question(story: str, rng: random.Random) -> str:
    """What `judge` asks about a story, with some mark or other."""
    mark = f"[[{rng.randbytes(8).hex()}]]"
    rubric = RUBRIC.format(completion=f"{mark}\n{story}\n{mark}")
    return QUESTION.format(mark=mark, rubric=rubric, low=SCALE[0], high=SCALE[1])


def make(folder: Path) -> None:
    train, held = make_rows()
    tiny.write_rows(folder, train, held)
    rng = random.Random(tiny.SEED)
    rows = train * TOLD
    tiny.make_base(folder / "base", [(row["prompt"], say(tell(rng), row)) for row in rows], STEPS)
    graded = []
    for row in rows:
        sentences = anything(rng)
        story, deserved = say(sentences, row), grade(sentences)
        if rng.random() < GARBLED:
            story, deserved = garble(story, rng), SCALE[0]
        graded.append(([{"role": "user", "content": question(story, rng)}], f"Score: {deserved}"))
    tiny.make_base(folder / "judge", graded, JUDGE_STEPS, context=512)


if __name__ == "__main__":
    tiny.run(__file__, make)
