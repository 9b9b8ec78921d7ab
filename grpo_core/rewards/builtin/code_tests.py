"""Unit tests as data: what each asks the program, and how the answer is judged outside the program's reach.

A test is `{"input": TEXT, "output": TEXT}`, compared with what the program reads and prints, or an assertion with one
expression that only the program can evaluate:

    assert add(2, 3) == 5             assert abs(Circle(1).area() - 3.14159) < 1e-4             assert not is_prime(9)

That expression goes into the sandbox. The rest of the assertion, above all the expected value, does not: it is
evaluated here, on the value that came back as data. So nothing that a program does to its surroundings makes a test
pass. For the same reason, an expression that only has to be true or false takes literals: `assert is_prime(7)`, not
`assert eq(f(3), 9)`.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

from grpo_core.system.sandbox.bubblewrap import Call, Input

# Functions that an assertion may use around the program's expression: on data, none runs long or reaches anything.
FUNCTIONS: dict[str, Any] = {
    **{kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)},
    **{function.__name__: function for function in (abs, all, any, isinstance, len, max, min, round, sorted, sum)},
    "isclose": math.isclose,
}
NODES = (
    *(ast.Expression, ast.Compare, ast.cmpop, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.unaryop, ast.BinOp, ast.Add),
    *(ast.Sub, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Subscript, ast.Slice, ast.Name, ast.Load),
    *(ast.Call, ast.keyword),
)
ANSWER = "_"  # name of the program's answer in the expression that is evaluated here


class UnitTestError(ValueError):
    """A unit test that cannot be judged; the message says which, and why."""


@dataclass(frozen=True)
class UnitTest:
    """A question to the program, and what must hold for the answer: an expression, or the text that it must be."""

    question: Call | Input
    expected: CodeType | str

    def passes(self, answer: Any) -> bool:
        if answer is ...:
            return False
        if isinstance(self.expected, str):
            return isinstance(answer, str) and _lines(answer) == _lines(self.expected)
        try:
            return bool(eval(self.expected, {"__builtins__": {}, **FUNCTIONS, ANSWER: answer}))
        except Exception:  # the answer is of another kind than the assertion takes
            return False


def read_test(test: str | Mapping[str, str]) -> UnitTest:
    """Read a unit test from the data. Raises UnitTestError if it cannot be judged."""
    if isinstance(test, str):
        return _assertion(test)
    given, wanted = test.get("input"), test.get("output")
    if not isinstance(given, str) or not isinstance(wanted, str):
        raise UnitTestError(f"the test {dict(test)!r} needs the texts 'input' and 'output'")
    return UnitTest(Input(given), wanted)


@lru_cache(maxsize=10_000)  # the completions of a group have the same tests
def _assertion(test: str) -> UnitTest:
    try:
        statements = ast.parse(test.strip()).body
    except (SyntaxError, ValueError) as error:
        raise UnitTestError(f"the test {test!r} is not Python: {error}") from None
    if len(statements) != 1 or not isinstance(statements[0], ast.Assert):
        raise UnitTestError(f"the test {test!r} is not one assertion and nothing else")
    split = _Split()
    around = ast.Expression(split.visit(statements[0].test))
    for node in ast.walk(around):
        if not isinstance(node, NODES):
            raise UnitTestError(
                f"the test {test!r} has a {type(node).__name__} around the program's expression, where only "
                f"comparisons, literals, + and -, indices and {', '.join(FUNCTIONS)} are known; write the value out"
            )
    if len(split.asked) != 1:
        raise UnitTestError(
            f"the test {test!r} asks the program for {len(split.asked)} values; ask it for one, and compare that with "
            "a constant"
        )
    if not any(map(_is_value, ast.walk(around))) and not _takes_literals(split.asked[0]):
        raise UnitTestError(
            f"the test {test!r} leaves the comparison to the program, which could claim anything; compare its value "
            "with the right one"
        )
    return UnitTest(Call(ast.unparse(split.asked[0])), compile(ast.fix_missing_locations(around), "test", "eval"))


class _Split(ast.NodeTransformer):
    """Replaces each part that only the program can evaluate by ANSWER, and collects these parts in `asked`."""

    def __init__(self) -> None:
        self.asked: list[ast.expr] = []

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if _allowed_function(node.func) is None:
            return self._ask(node)
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name | ast.Attribute) -> ast.AST:
        known = _allowed_function(node)
        return self._ask(node) if known is None else ast.Name(known, ast.Load())

    visit_Attribute = visit_Name

    def _ask(self, node: ast.expr) -> ast.AST:
        self.asked.append(node)
        return ast.Name(ANSWER, ast.Load())


def _allowed_function(node: ast.expr) -> str | None:
    """Name of the function of FUNCTIONS that the node names; None if it names another."""
    name = ast.unparse(node).removeprefix("math.")
    return name if name in FUNCTIONS else None


def _is_value(node: ast.AST) -> bool:
    """True if the node is a value to compare the answer with: a collection, or a constant except True, False and
    None."""
    return isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict)) or (
        isinstance(node, ast.Constant) and not isinstance(node.value, (bool, type(None)))
    )


def _takes_literals(asked: ast.expr) -> bool:
    """True if what is asked is a name, or a call such as `f(1)` or `Class().f(1)` whose arguments contain no variable
    and no comparison."""
    if not isinstance(asked, ast.Call):
        return True
    function = asked.func
    if isinstance(function, ast.Attribute) and isinstance(made := function.value, ast.Call):
        if made.args or made.keywords:
            return False
        function = made.func
    given = [*asked.args, *asked.keywords]
    return not (
        any(isinstance(node, (ast.Call, ast.Compare, ast.Lambda)) for node in ast.walk(function))
        or any(isinstance(node, (ast.Name, ast.Compare, ast.Lambda)) for part in given for node in ast.walk(part))
    )


def _lines(text: str) -> list[str]:
    """Lines of printed text without trailing white space and without empty lines at the end, which do not count."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
