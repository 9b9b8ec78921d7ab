"""Tools that ship."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.config.environment import EnvironmentConfig
from grpo_core.environments.builtin.calculator import calculator
from grpo_core.environments.conversation import Conversation, converse
from grpo_core.environments.processes import Environments
from grpo_core.environments.registry import EnvironmentsError
from grpo_core.rollout.conversations import play
from grpo_core.rollout.types import Sampling
from grpo_core.system.sandbox import bubblewrap
from tests.grpo_core.environments.scripted import Scripted, call, turns

FORMAT = turns()


def _answers(environments: Environments, *scripts: list[str]) -> list[list[str]]:
    rows = [{"prompt": [{"role": "user", "content": f"#{place}"}]} for place in range(len(scripts))]
    plays = [converse(row, 11, 9000, environments, FORMAT) for row in rows]
    found: dict[int, Conversation] = {}
    for ended in play(Scripted(scripts, FORMAT), plays, [0] * len(plays), Sampling(9000)):
        found |= dict(ended)
    environments.free_all()
    return [
        [message["content"] for message in found[place].said.messages if message["role"] == "tool"]
        for place in range(len(scripts))
    ]


def _python(code: str) -> str:
    return call("python", f'{{"code": "{code}"}}')


@pytest.mark.needs("bwrap")
@pytest.mark.slow
def test_python_keeps_its_variables_for_one_conversation_and_leaves_nothing() -> None:
    us = psutil.Process()
    others = us.children()  # of other tests
    environments = Environments(EnvironmentConfig(tools=["python"], tool_timeout=60.0))
    guards = [it for it in us.children() if it not in others]
    try:
        scripts = [[_python("x = 6"), _python("x * 7") + _python("import os; os._exit(1)"), _python("x"), "42"]]
        scripts += [[_python("x"), _python("print('own')"), "."]]
        first, second = _answers(environments, *scripts)
        assert first[:2] == ["(no output)", "42\n"] and "Its variables are gone" in first[2]
        assert "NameError" in first[3] and "NameError" in second[0] and second[1] == "own\n"
        (again,) = _answers(environments, [_python("x"), "."])
        assert "NameError" in again[0]
        _answers(environments, ["."], ["."])  # both environments have heard that the conversations before are over
        _, alive = psutil.wait_procs(_sandboxes(guards), timeout=60)
        assert alive == []  # a sandbox ends with its conversation, not only with the run
        _answers(environments, [_python("import os; os.fork(); 1"), "."])
        started = [child for guard in guards for child in guard.children(recursive=True)]
        assert started
    finally:
        environments.close()
    _, alive = psutil.wait_procs(started, timeout=60)
    assert alive == []


def _sandboxes(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that they have started and that run: the trial of the sandbox is left as a zombie."""
    found = []
    for child in (child for process in processes for child in process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            if child.name() == "bwrap" and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


@pytest.mark.slow
def test_without_a_sandbox_python_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bwrap").symlink_to("/bin/false")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        EnvironmentsError, match=r"builtin.python:python' .*no sandbox: mkdir \(of Debian's coreutils\), mount"
    ) as refused:
        Environments(EnvironmentConfig(tools=["python"]))
    assert 'sandbox = "none"' not in str(refused.value)
    bubblewrap.require.cache_clear()


# None of which a quotient is infinite: that is refused, also where Python goes on with it.
FLOATS = st.floats(-1e6, 1e6).filter(lambda number: not 0 < abs(number) < 1e-9)
NUMBERS = st.integers(-(10**6), 10**6).map(str) | FLOATS.map(repr)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: (
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(
            lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"
        )
        | inner.map(lambda it: f"-{it}")
        | st.tuples(inner, inner).map(lambda parts: f"max({parts[0]}, {parts[1]})")
    ),
    max_leaves=12,
)


@pytest.mark.slow
@given(expression=EXPRESSIONS)
def test_the_calculator_computes_as_python_does(expression: str) -> None:
    try:
        value = eval(expression)
        assert math.isfinite(value) and abs(Fraction(value)) <= 10**1000
    except (ArithmeticError, AssertionError, ValueError) as error:
        with pytest.raises((ArithmeticError, ValueError)):
            calculator(expression)
        assert not isinstance(error, MemoryError)
    else:
        assert calculator(expression) == str(value)


@pytest.mark.parametrize(
    "expression",
    [
        *("9**9**9", "10**1000**1000", "(10**100)**1000*10**900*10**900", "2**0.5**-1000000", "9" * 10**6),
        *("(" * 10**5, "-" * 10**5 + "1", "1" + "+1" * 10**5, "(" * 90 + "1" + ")" * 90 + "x", "0x" + "f" * 10**6),
        *("(-8)**0.5", "1/0", "0**-1", "1e308*10", "1e999", "round(1, 10**10)", "round(10**1000, -10**9)", "sqrt(-1)"),
        *("round(10**100, -(10**9))", "max()", "max(1)", "abs()", "1 if 1 else 2", "'a'*9", "[1]*10**9", "True", "1j"),
        *("__import__('os')", "abs.__class__", "round(1.5, 0.5)", "\0", "\ud800", "", "x", "1;2", "lambda: 1"),
        *("max(" + "1," * 10**5 + "1)", "10**1000*10**1000*10**1000", "(10**1000)//3*10**1000", "10**-1000", "5 % 0"),
        *("round(1e300*1e300)", "1_" * 1000, "10**999+0.5", "10**999/3", "sqrt(10**900)", "(2**3000)**0.1"),
    ],
)  # fmt: skip
def test_the_calculator_refuses_what_is_too_large_or_no_arithmetic_quickly(expression: str) -> None:
    try:
        answer = calculator(expression)
    except (ValueError, ArithmeticError) as error:
        assert len(str(error)) < 300 and "\n" not in str(error)
        str(error).encode()
    else:
        assert re.fullmatch(r"-?[\d.e+-]+", answer) and len(answer) < 1200, answer
