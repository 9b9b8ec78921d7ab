"""The reward for mathematical answers: equal ones in hard forms, attempts without one, and its time limits."""

from __future__ import annotations

import functools
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from math_verify import parse, verify

from grpo_core.config.inputs import RewardConfig
from grpo_core.errors import RewardError
from grpo_core.rewards.batch import Batch
from grpo_core.rewards.builtin.maths import reward as maths
from grpo_core.rewards.builtin.maths.reward import math_answer
from grpo_core.rewards.builtin.maths.worker import compare
from grpo_core.rewards.contract import resolve
from grpo_core.rewards.scoring import score


@pytest.mark.slow
@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("The answer is 42.", 42),
        (r"\boxed{42}", "#### 42"),
        (r"That costs \$42", "42"),
        ("1,234", "1234"),
        ("1e3", "1000"),
        ("1 1/2", "1.5"),
        ("0.5", r"\frac{1}{2}"),
        (r"\frac{1}{2}", "0.5"),
        (r"so $x = \frac{2}{4}$", r"\frac12"),
        ("0.333333", "1/3"),
        ("50%", "50"),
        (r"2\sqrt{3}", r"\sqrt{12}"),
        (r"\(x^2+2x+1\)", "(x+1)^2"),
        (r"\boxed{2, 1}", r"\{1, 2\}"),
        (r"\boxed{(1, 2]}", "(1,2]"),
        (r"\boxed{\text{east}}", "east"),
        (r"first \boxed{41}, but no: the final answer is $42$", "42"),
        ("<think>42-1=41</think><answer>42</answer>", "42"),
    ],
)
def test_math_answer_knows_equal_answers(completion: str, answer: Any) -> None:
    assert math_answer([completion], [answer]) == [1]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("", "42"),
        ("<think>41+1=42</think><answer>41</answer>", "42"),
        ("42 <answer></answer>", "42"),
        ("]}) \\frac{1 $ {", "42"),
        ("4.2", "42"),
        ("-42", "42"),
        ("5e3", "5"),
        ("1 1/2", "1"),
        (r"\frac{1}{2}", "2"),
        (r"\boxed{42", "42"),
        ("0.33", "1/3"),
        (r"\boxed{41} or \boxed{42}", "42"),  # every candidate in a box of its own
        (r"\boxed{41 \text{ or } 42}", "42"),
        (r"\boxed{41, 42}", "42"),
        ("0", "0.0000001"),  # within the rounding to six decimals
        ("0.0000001", "0"),
        ("$10^{-30}$", "10^{-20}"),
        (r"$\frac{0}{0}$", "42"),
        (r"$\infty$", "42"),
        (r"\boxed{x}", "42"),
        (r"\boxed{42 = 41}", "42"),
        (r"\boxed{y < 3}", "x < 3"),
        ("4" * 5000, "42"),
        ("\ud800", "42"),
        (r"\boxed{\text{west}}", "east"),
        ("seat", "east"),  # the same product of variables
        ("__import__('os')._exit(0)", "42"),
    ],
)
def test_math_answer_is_not_fooled(completion: str, answer: str) -> None:
    assert math_answer([completion], [answer]) == [0]


CASES = Path(__file__).with_name("math_cases.txt").read_text(encoding="utf-8")


@pytest.mark.slow
def test_math_answer_judges_every_case_of_the_table_rightly_but_the_known_limits() -> None:
    lines = [line for line in CASES.splitlines() if " ;; " in line and not line.startswith("# ")]
    cases = [line.replace("⏎", "\n").split(" ;; ") for line in lines]
    ours = math_answer([case[0] for case in cases], [case[1] for case in cases])
    assert len(cases) > 900
    parsed = functools.cache(lambda text: parse(text, parsing_timeout=None))  # most answers come again
    for (completion, answer, truth, *reason), verdict in zip(cases, ours, strict=True):
        (why,) = reason or [""]
        theirs = verify(parsed(f"\\boxed{{{answer}}}"), parsed(completion), timeout_seconds=None)
        right = {"1": 1, "0": 0, "-": None}[truth]
        assert (verdict == right) == (not why.startswith("limit")), (completion, answer, why)
        assert (theirs == bool(right)) == (not why or why.startswith("limit: ")), (completion, answer, why)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("(" * 3000 + "42" + ")" * 3000, 0),
        (r"\boxed{" * 2000 + "42" + "}" * 2000, 1),
        (r"\boxed{" * 20_000, 0),
        ("$" * 20_001 + "42", 0),
        ("answer " * 5000 + "is 42", 1),
        ("so " * 20_000 + r"\boxed{42}", 1),
        (r"\boxed{42}" + " and so on" * 5000, 1),
        ("1 " * 20_000, 0),
        ("1,000 or " * 2000 + "42", 0),
    ],
)
def test_math_answer_reads_long_texts(completion: str, right: int) -> None:
    assert math_answer([completion], ["42"]) == [right]


def test_a_relative_tolerance_lets_rounded_answers_pass() -> None:
    completions, answer = ["3.46", "3.5", r"\boxed{\sqrt{12}}"], "3.4641"
    assert math_answer(completions, [answer] * 3) == [0, 0, 1]
    assert math_answer(completions, [answer] * 3, relative_tolerance=0.002) == [1, 0, 1]


def test_math_answer_does_not_apply_where_there_is_nothing_to_compare_with() -> None:
    assert math_answer(["42"] * 3, [None, "", "  "]) == [None] * 3  # type: ignore[list-item]


@pytest.mark.slow
def test_an_endless_computation_is_a_wrong_answer_and_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(maths, "SECONDS", 0.3)
    before = signal.getsignal(signal.SIGALRM)
    completions = [r"\boxed{42}", "41", *[r"\boxed{9^{9^{9^9}}}"] * 100]  # said again and again it takes its time once
    assert math_answer(completions, ["42"] * 102) == [1, 0, *[0] * 100]
    assert signal.getsignal(signal.SIGALRM) is before


DEGENERATE = [f"{piece * 450}{number}" for piece in ("((", "|x|", "{{", "9^") for number in range(16)]


@pytest.mark.slow
def test_degenerate_texts_are_wrong_and_never_reach_math_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr("math_verify.parse", lambda text, *args, **kwargs: read.append(text) or parse(text))
    completions = [
        *DEGENERATE,
        *(f"\\boxed{{{text[:900]}}}" for text in DEGENERATE),
        *("$" + text for text in DEGENERATE),
    ]
    assert not any(compare(completion, "42") for completion in completions)
    assert max(map(len, read), default=0) < 50
    assert math_answer(DEGENERATE, ["42"] * 64) == [0] * 64


@pytest.mark.slow
def test_slow_answers_of_a_batch_share_one_budget_and_the_quick_ones_are_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = [rf"\boxed{{({10**8 + number})!}}" for number in range(64)]
    monkeypatch.setattr(maths, "SPARE_SECONDS", 0.2)
    assert math_answer([*slow[:4], r"\boxed{42}"], ["42"] * 5) == [0] * 4 + [1]
    monkeypatch.undo()
    limits = []

    def takes_its_limit(worker: Any, text: str, answer: str, tolerance: float, limit: float) -> tuple[float, float]:
        limits.append(limit)
        return 0.0, limit

    monkeypatch.setattr(maths, "_compare", takes_its_limit)
    assert math_answer(slow, ["42"] * 64) == [0] * 64
    assert limits[0] == maths.SECONDS
    assert sum(limits) <= maths.SPARE_SECONDS + 64 * maths.FAIR_SECONDS + 1e-6
    assert sum(limits) < RewardConfig(function="math_answer").timeout / 2


def test_tags_that_never_close_are_read_in_one_pass() -> None:
    assert math_answer(["<answer>" * 50_000 + "42</answer>"], ["42"]) == [1]


@pytest.mark.slow
def test_the_time_limit_of_a_reward_holds_for_math_answer_and_the_next_call_gets_its_own_answers() -> None:
    assert math_answer(["42"], ["42"]) == [1]
    reward = resolve(RewardConfig(function="math_answer", timeout=0.05))
    batch = Batch([{"prompt": "", "answer": "41"}], [r"\boxed{9^{9^{9^9}}}"], [[1]])
    with pytest.raises(RewardError, match=r"did not come back within 0\.05 s"):
        score([reward], batch)
    assert math_answer(["42", "41"], ["42", "42"]) == [1, 0]


@pytest.mark.slow
def test_the_process_that_compares_ends_with_the_one_that_asks() -> None:
    asks = "from grpo_core.rewards.builtin.maths import reward as maths; import os\n"
    asks += (
        "assert maths.math_answer(['1'], ['1']) == [1]; print(maths._worker().pid, flush=True); os.kill(os.getpid(), 9)"
    )
    worker = int(subprocess.run([sys.executable, "-c", asks], stdout=subprocess.PIPE, text=True).stdout)
    with suppress(ProcessLookupError):
        assert select.select([os.pidfd_open(worker)], [], [], 60)[0]
