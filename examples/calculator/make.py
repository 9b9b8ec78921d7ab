"""The recipe "calculator": large products, and a base model that guesses them, and calls a calculator now and then."""

from __future__ import annotations

import json
import random
from pathlib import Path

from examples import tiny

TRAIN_ROWS, EVAL_ROWS, DEMONSTRATIONS = 1000, 200, 2000
CALLS = 0.15  # share of the demonstrations that call the calculator; the others guess
STEPS, CONTEXT = 300, 128
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>\n"
    "{\"name\": \"{{ call['function']['name'] }}\", \"arguments\": {{ call['function']['arguments'] | tojson }}}"
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def question(rng: random.Random) -> tuple[int, int]:
    return rng.randint(100, 999), rng.randint(100, 999)


def demonstrations(rng: random.Random) -> list[tiny.Demonstration]:
    """Guesses, calls, and what to say once the calculator has answered."""
    found: list[tiny.Demonstration] = []
    for _ in range(DEMONSTRATIONS):
        a, b = question(rng)
        asked = [{"role": "user", "content": f"{a}*{b}"}]
        if rng.random() >= CALLS:
            found.append((asked, str(rng.randint(10**4, 10**6))))
            continue
        call = {"name": "calculator", "arguments": {"expression": f"{a}*{b}"}}
        text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        answer = str(a * b)
        found.append((asked, text))
        found.append(([*asked, {"role": "assistant", "content": text}, {"role": "tool", "content": answer}], answer))
    return found


def make(folder: Path) -> None:
    rng = random.Random(tiny.SEED)
    pairs = {question(rng) for _ in range(3 * (TRAIN_ROWS + EVAL_ROWS))}
    rows = [{"prompt": [{"role": "user", "content": f"{a}*{b}"}], "answer": str(a * b)} for a, b in sorted(pairs)]
    rng.shuffle(rows)
    tiny.write_rows(folder, rows[:TRAIN_ROWS], rows[TRAIN_ROWS : TRAIN_ROWS + EVAL_ROWS])
    tiny.make_base(folder / "base", demonstrations(rng), STEPS, CONTEXT, TEMPLATE)


if __name__ == "__main__":
    tiny.run(__file__, make)
