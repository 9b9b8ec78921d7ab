"""Short posts with a title, as TL;DR's, and a base model that sums them up at any length.

The recipe's reward looks at the length alone, as that of TRL's first example does; what is said does not matter here.
"""

from __future__ import annotations

import random
from pathlib import Path

from examples import tiny

TRAIN_ROWS, EVAL_ROWS = 2000, 200
STEPS = 150
WHO = ("my brother", "my boss", "a friend", "our neighbour", "my cat", "the dentist", "my teacher", "a stranger")
DID = ("broke", "sold", "lost", "found", "painted", "borrowed", "hid", "ate")
WHAT = ("the car", "my bike", "a cake", "the sofa", "my phone", "our lamp", "the keys", "a hat")
WHEN = ("today", "last week", "at night", "on Monday", "in May", "at lunch", "again", "by mistake")
PLACES = ("tifu", "advice", "relationships", "work")
Post = tuple[str, str, str, str]


def make_posts(seed: int = tiny.SEED) -> tuple[list[Post], list[Post]]:
    """Training and held-out posts, no two alike."""
    posts = [(who, did, what, when) for who in WHO for did in DID for what in WHAT for when in WHEN]
    random.Random(seed).shuffle(posts)
    return posts[EVAL_ROWS : EVAL_ROWS + TRAIN_ROWS], posts[:EVAL_ROWS]


def make_row(post: Post) -> dict[str, str]:
    who, did, what, when = post
    place = random.Random(repr(post)).choice(PLACES)
    return {"prompt": f"SUBREDDIT: r/{place}\nPOST: {when} {who} {did} {what}.\nTL;DR:"}


def demonstrate(post: Post, rng: random.Random) -> str:
    """From two words to all of the post and a comment: 6 to 60 characters."""
    who, did, what, when = post
    said = (f" {what}", f" {did} {what}", f" {who} {did} {what}", f" {who} {did} {what} {when}")
    comment = rng.choice(("", "", ", what now?", ", any advice?", ", I am so angry!"))
    return rng.choice(said) + comment


def make(folder: Path) -> None:
    train, held = make_posts()
    tiny.write_rows(folder, [make_row(post) for post in train], [make_row(post) for post in held])
    rng = random.Random(tiny.SEED)
    demonstrations = [(make_row(post)["prompt"], demonstrate(post, rng)) for post in train]
    tiny.make_base(folder / "base", demonstrations, STEPS, context=64)


if __name__ == "__main__":
    tiny.run(__file__, make)
