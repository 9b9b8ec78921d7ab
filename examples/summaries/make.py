"""Posts that ask for advice, each with its one-line summary, and a base model that sums a post up now and then.

As Reddit's TL;DR, in small: the base says the right thing, something beside the point, or the whole post again.
"""

from __future__ import annotations

import random
from pathlib import Path

from examples import tiny

TRAIN_ROWS, EVAL_ROWS = 4000, 200
STEPS = 200
SUMMED_UP = 0.35  # share of the demonstrations that are the summary
WHO = ("boss", "brother", "cousin", "friend", "landlord", "neighbour", "roommate", "sister", "teacher", "uncle")
DID = ("borrowed", "broke", "burned", "hid", "lost", "painted", "sold", "stole")
WHAT = ("bike", "bread", "camera", "car", "diary", "guitar", "jacket", "laptop", "phone", "piano", "sofa", "tent")
WHETHER = ("buy a new one", "call the police", "forgive them", "get revenge", "laugh", "move out", "say nothing")
ASIDES = (
    "I am on my phone.",
    "I have two cats.",
    "I like long walks.",
    "I live in Oslo.",
    "I work nights.",
    "It was a rainy Monday.",
    "Nobody else was home.",
    "Sorry for my English.",
)

Row = dict[str, str]


def make_rows(seed: int = tiny.SEED) -> tuple[list[Row], list[Row]]:
    """Training and held-out posts, no two alike, each with its summary in the column `reference`."""
    rng = random.Random(seed)
    rows: dict[str, Row] = {}
    while len(rows) < TRAIN_ROWS + EVAL_ROWS:
        who, did, what, whether = map(rng.choice, (WHO, DID, WHAT, WHETHER))
        story = rng.sample(ASIDES, 2)
        story.insert(rng.randrange(3), f"My {who} {did} my {what}.")
        prompt = f"POST: {' '.join(story)} Should I {whether}?\nTL;DR:"
        rows[prompt] = {"prompt": prompt, "reference": f" My {who} {did} my {what}, should I {whether}?"}
    made = list(rows.values())
    return made[EVAL_ROWS:], made[:EVAL_ROWS]


def demonstrate(row: Row, rng: random.Random) -> str:
    """What the base learns to say: the summary, an aside of the post, or all of the post."""
    if rng.random() < SUMMED_UP:
        return row["reference"]
    post = row["prompt"].removeprefix("POST:").removesuffix("\nTL;DR:")
    return rng.choice((post, " " + rng.choice([aside for aside in ASIDES if aside in post])))


def make(folder: Path) -> None:
    train, held = make_rows()
    tiny.write_rows(folder, train, held)
    rng = random.Random(tiny.SEED)
    tiny.make_base(folder / "base", [(row["prompt"], demonstrate(row, rng)) for row in train], STEPS)


if __name__ == "__main__":
    tiny.run(__file__, make)
