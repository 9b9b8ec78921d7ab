"""Rows made up here in the formats of published data sets: the same columns, types and oddities."""

from __future__ import annotations

GSM8K = [
    {
        "question": f"Ann has {n} apples and buys {n + 2}. How many has she?",
        "answer": f"She has {n} + {n + 2} = <<{n}+{n + 2}={2 * n + 2}>>{2 * n + 2} apples.\n#### {2 * n + 2}",
    }
    for n in range(12)
]
MBPP = [  # lines end in \r\n, and a few tests need code before them
    {
        "task_id": n,
        "text": f"Write a function to add {n} to a number.",
        "code": f"def add(x):\r\n    return x + {n}",
        "test_list": [f"assert add({'start' if n == 3 else 1}) == {1 + n}", f"assert add(0) == {n}"],
        "test_setup_code": "start = 1" if n == 3 else "",
        "challenge_test_list": [],
    }
    for n in range(12)
]
MBPP_SANITIZED = [
    {
        "source_file": "Benchmark Questions Verification V2.ipynb",
        "task_id": n,
        "prompt": f"Write a function to multiply a number by {n}.",
        "code": f"def times(x):\n    return x * {n}",
        "test_imports": ["import math"] if n == 3 else [],
        "test_list": [f"assert times(2) == {2 * n}", f"assert math.isclose(times(0.5), {0.5 * n})"],
    }
    for n in range(12)
]
TLDR = [  # trl-lib/tldr
    {
        "prompt": f"SUBREDDIT: r/cats\n\nTITLE: My cat\n\nPOST: My cat has {n} toys, and wants more.\n\nTL;DR:",
        "completion": f" My cat has {n} toys.",
    }
    for n in range(12)
]
TLDR_POSTS = [  # openai/summarize-from-feedback
    {
        "id": f"t3_{n}",
        "subreddit": "cats",
        "title": f"My {n} cats",
        "post": f"I have {n} cats.\nThey sleep all day.",
        "summary": f"My {n} cats sleep.",
    }
    for n in range(12)
]
MESSAGES = [  # OpenAI's
    {
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": f"Say {n}"},
            {"role": "assistant", "content": f"It is {n}."},
        ]
    }
    for n in range(12)
]
CONVERSATIONS = [  # ShareGPT's
    {
        "id": f"share_{n}",
        "conversations": [{"from": "human", "value": f"Say {n}"}, {"from": "gpt", "value": f"It is {n}."}],
    }
    for n in range(12)
]
