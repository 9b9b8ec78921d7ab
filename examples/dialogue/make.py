"""Questions in a conversation, a base model that helps now and then, and a reward model that knows what helps.

The reward model is taught as reward models are, on pairs: which of two answers is the better one (Bradley-Terry, as in
arXiv:2203.02155, section 3.4).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples import tiny

if TYPE_CHECKING:
    from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

TRAIN_ROWS, EVAL_ROWS = 2000, 200
STEPS, REWARD_STEPS, WEAK_STEPS = 150, 200, 60
CONTEXT = 192  # tokens
HELPFUL = 0.3  # share of the demonstrations that help
SYSTEM = "You are a friendly assistant. Help in one or two sentences."
HELP = {
    "boil an egg": "Put it in hot water for ten minutes.",
    "clean a carpet": "Brush in some soda and vacuum it.",
    "fix a flat tyre": "Find the hole and glue a patch on it.",
    "fold a shirt": "Lay it flat and turn in both sleeves.",
    "grow tomatoes": "Give them sun and water every day.",
    "learn a language": "Read aloud and speak with people.",
    "make good tea": "Let the leaves steep for three minutes.",
    "pack a suitcase": "Roll your clothes and fill the shoes.",
    "paint a wall": "Tape the edges and roll on two coats.",
    "sharpen a knife": "Draw it over a wet stone.",
    "sleep better": "Keep the room dark and go to bed early.",
    "tie a tie": "Cross the ends and pull one through the loop.",
}
ASKED = ("How do I {}?", "What is the best way to {}?", "Can you help me {}?", "I want to {}. What do I do?")
NAMES = ("Ada", "Ben", "Eva", "Kai", "Mia", "Tom")
GREETINGS = ("Good evening", "Good morning", "Hello", "Hi", "Hey")
CURT = ("I do not know.", "Why do you ask?", "Look it up.", "That is easy.")

Messages = list[dict[str, str]]


def make_rows(seed: int = tiny.SEED) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out conversations, no two alike; in half of them something was said before the question."""
    rng = random.Random(seed)
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < TRAIN_ROWS + EVAL_ROWS:
        topic, asked, name, greeting = map(rng.choice, (list(HELP), ASKED, NAMES, GREETINGS))
        before = f"{greeting}, I am {name}."
        question = asked.format(topic)
        if rng.random() < 0.5:
            turns = [before, f"{greeting}, {name}. What can I do for you?", question]
        else:
            turns = [f"{before} {question}"]
        roles = ("user", "assistant", "user")
        prompt = [{"role": "system", "content": SYSTEM}]
        prompt += [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
        rows[repr(prompt)] = {"prompt": prompt, "category": topic, "name": name}
    made = list(rows.values())
    return made[EVAL_ROWS:], made[:EVAL_ROWS]


def helpful(row: dict[str, Any]) -> str:
    """What helps: the steps, said to the person who asked."""
    return f"Sure, {row['name']}! {HELP[row['category']]}"


def unhelpful(row: dict[str, Any], rng: random.Random) -> str:
    """Nothing at all, help with something else, or the right steps over and over."""
    other = rng.choice([topic for topic in HELP if topic != row["category"]])
    return rng.choice(
        (rng.choice(CURT), f"Sure, {row['name']}! {HELP[other]}", " ".join([HELP[row["category"]]] * rng.randint(2, 3)))
    )


def teach_reward_model(
    folder: Path,
    base: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    rows: Sequence[dict[str, Any]],
    held: Sequence[dict[str, Any]],
    steps: int,
) -> None:
    """Save in `folder` the base with one output in place of its head, taught to be higher for the better of two
    answers; print how often it is."""
    import torch
    from transformers import Qwen2ForSequenceClassification

    torch.manual_seed(tiny.SEED)
    rng = random.Random(tiny.SEED)
    config = deepcopy(base.config)
    config.num_labels = 1
    model = Qwen2ForSequenceClassification(config)
    model.model.load_state_dict(base.model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=tiny.LEARNING_RATE, weight_decay=0.0)

    def margins(chosen: Sequence[dict[str, Any]]) -> torch.Tensor:
        """Score of the helpful answer less that of the other. (B,)"""
        talks = [
            [*row["prompt"], {"role": "assistant", "content": text}]
            for texts in zip(*(_pair(row, rng) for row in chosen), strict=True)
            for row, text in zip(chosen, texts, strict=True)
        ]
        inputs: Any = tokenizer.apply_chat_template(
            talks, return_dict=True, return_tensors="pt", padding=True, padding_side="right"
        )
        better, worse = model(**inputs).logits.squeeze(1).chunk(2)
        return better - worse

    for _ in range(steps):
        loss = -torch.nn.functional.logsigmoid(margins(rng.sample(rows, tiny.BATCH))).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        right = (margins(held) > 0).float().mean().item()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder.name}: prefers the helpful answer in {right:.0%} of {len(held)} held-out pairs", flush=True)


def make(folder: Path) -> None:
    train, held = make_rows()
    tiny.write_rows(folder, train, held)
    rng = random.Random(tiny.SEED)
    said = [helpful(row) if rng.random() < HELPFUL else unhelpful(row, rng) for row in train]
    demonstrations = [(row["prompt"], text) for row, text in zip(train, said, strict=True)]
    base, tokenizer = tiny.make_base(folder / "base", demonstrations, STEPS, CONTEXT)
    teach_reward_model(folder / "reward-model", base, tokenizer, train, held, REWARD_STEPS)
    # A reward model to see fail: it ranks most pairs, and ignores the question.
    untaught = tiny.make_model(tokenizer, CONTEXT)
    teach_reward_model(folder / "weak-reward-model", untaught, tokenizer, train, held, WEAK_STEPS)


def _pair(row: dict[str, Any], rng: random.Random) -> tuple[str, str]:
    return helpful(row), unhelpful(row, rng)


if __name__ == "__main__":
    tiny.run(__file__, make)
