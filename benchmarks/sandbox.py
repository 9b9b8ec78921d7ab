"""Measures how many small programs per second the reward `unit_tests` runs in its sandbox on this machine.

    python -m benchmarks.sandbox [--programs 500]

A program is one or two functions with three assertions, or reads and prints with two tests, each test in a process of
its own. All programs are correct: a run counts only if each gets its full reward.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from typing import Any

from grpo_core.rewards.builtin.code import unit_tests

FUNCTIONS: list[tuple[str, list[Any]]] = [
    (
        "def add(a, b):\n    return a + b",
        ["assert add(2, 3) == 5", "assert add(-1, 1) == 0", "assert add('a', 'b') == 'ab'"],
    ),
    (
        "def is_prime(n):\n    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))",
        ["assert is_prime(97)", "assert not is_prime(91)", "assert is_prime(2) == True"],
    ),
    (
        "from collections import Counter\n\ndef most_common(words):\n    return Counter(words).most_common(1)[0]",
        [
            "assert most_common(['a', 'b', 'a']) == ('a', 2)",
            "assert most_common(['c']) == ('c', 1)",
            "assert most_common('xxy')[0] == 'x'",
        ],
    ),
    (
        "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
        ["assert fibonacci(10) == 55", "assert fibonacci(0) == 0", "assert fibonacci(90) == 2880067194370816120"],
    ),
]
PRINTING: list[tuple[str, list[Any]]] = [
    (
        "n = int(input())\nprint(sum(int(x) for x in input().split()[:n]))",
        [{"input": "3\n1 2 3\n", "output": "6\n"}, {"input": "1\n-5\n", "output": "-5\n"}],
    ),
    (
        "import sys\nfor line in sys.stdin:\n    print(line.strip()[::-1])",
        [{"input": "abc\nxy\n", "output": "cba\nyx\n"}, {"input": "", "output": ""}],
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.sandbox", description="Programs a second in the sandbox.")
    parser.add_argument("--programs", type=int, default=500, help="of each kind")
    count = parser.parse_args().programs
    cores = len(os.sched_getaffinity(0))
    for kind, programs in {
        "functions, 3 assertions each": FUNCTIONS,
        "reading and printing, 2 tests": PRINTING,
    }.items():
        chosen = [programs[i % len(programs)] for i in range(count)]
        completions = [f"```python\n{program}\n```" for program, _ in chosen]
        rows = [tests for _, tests in chosen]
        asyncio.run(unit_tests(completions[:cores], rows[:cores]))
        start = time.perf_counter()
        rewards = asyncio.run(unit_tests(completions, rows))
        seconds = time.perf_counter() - start
        if set(rewards) != {1.0}:
            raise RuntimeError(
                f"{sum(reward != 1 for reward in rewards)} right programs have not got their full reward"
            )
        print(
            f"{kind:30} {count} programs in {seconds:.1f} s: {count / seconds:.0f} a second on {cores} cores",
            flush=True,
        )


if __name__ == "__main__":
    main()
