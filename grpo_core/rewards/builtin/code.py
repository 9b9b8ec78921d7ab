"""Rewards for code that works."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from grpo_core.data.chat import text_of
from grpo_core.rewards.builtin.code_tests import UnitTest, UnitTestError, read_test
from grpo_core.rewards.builtin.record import BuiltinReward, Rewards
from grpo_core.system.sandbox.bubblewrap import Limits, Sandbox, ask, require

FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[^\n]*$", re.MULTILINE)


async def unit_tests(
    completions: Sequence[Any],
    tests: Sequence[list[Any]],
    cpu_seconds: int = 2,
    wall_seconds: float = 20.0,
    memory_mib: int = 256,
    processes: int = 8,
    output_kib: int = 64,
    scratch_mib: int = 16,
    sandbox: Sandbox = "bubblewrap",
) -> list[float | None]:
    """The share of the row's unit tests that the code in the completion's last fenced block passes; 0 without a block.

    A test is an assertion (`assert add(2, 3) == 5`, as in MBPP) or a struct of the texts `input`, which the program
    reads, and `output`, which it has to print; `code_tests` says what an assertion may be. None for a row without
    tests, or with a test that cannot be judged. The limits are those of `sandbox.Limits`. Raises SandboxError if there
    is no sandbox, unless `sandbox` is "none": then the code may do everything that you may.
    """
    require(sandbox)
    limits = Limits(cpu_seconds, wall_seconds, memory_mib, processes, output_kib, scratch_mib)
    loop = asyncio.get_running_loop()

    async def scored(completion: Any, row: list[Any]) -> float | None:
        row_tests = _read_tests(row)
        program = last_block(text_of(completion))
        if not row_tests or program is None:
            return 0.0 if row_tests else None
        questions = [test.question for test in row_tests]
        answers = await loop.run_in_executor(_workers(), ask, program, questions, limits, sandbox)
        return sum(test.passes(answer) for test, answer in zip(row_tests, answers, strict=True)) / len(row_tests)

    return await asyncio.gather(*map(scored, completions, tests))


def last_block(text: str) -> str | None:
    """The text between the last pair of code fences (``` or ~~~); None without a pair."""
    found = None
    opened: re.Match[str] | None = None
    for fence in FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif fence[0].strip().startswith(opened[1]) and not fence[0].strip().strip(opened[1][0]):
            found, opened = text[opened.end() + 1 : fence.start()], None
    return found


def _read_tests(row: Sequence[str | Mapping[str, str]]) -> list[UnitTest]:
    try:
        return [read_test(test) for test in row]
    except UnitTestError:
        return []


@cache
def _workers() -> ThreadPoolExecutor:
    """One thread per core that this process may use; each waits while a program runs."""
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return ThreadPoolExecutor(max(1, cores), thread_name_prefix="sandbox")


REWARDS: Rewards = {"unit_tests": BuiltinReward(unit_tests, (0.0, 1.0))}
