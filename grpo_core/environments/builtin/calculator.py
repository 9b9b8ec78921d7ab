"""A calculator."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

LARGEST = 10**1000
LONGEST = 1000  # characters
OPERATIONS: dict[type[Any], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def _round(number: float | int, digits: int = 0) -> float | int:
    if not isinstance(digits, int) or abs(digits) > 1000:
        raise ValueError("round takes a whole number of digits, at most 1000")
    return round(number, digits) if digits else round(number)


FUNCTIONS: dict[str, Callable[..., Any]] = {"sqrt": math.sqrt, "abs": abs, "round": _round, "min": min, "max": max}


def calculator(expression: str) -> str:
    """Computes the value of an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses, and sqrt, abs, round, min, max, such as (3 + 4) * 2.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has {len(expression):,} characters; {LONGEST:,} are the most")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(f"{expression[:80]!r} is no expression: {type(error).__name__}") from None
    try:
        return str(_value(tree.body))
    except RecursionError:
        raise ValueError("the expression nests too deep") from None
    except TypeError as error:  # a function with too few or too many arguments
        raise ValueError(str(error)) from None


def _value(node: ast.expr) -> float | int:
    match node:
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float() as number):
            return _bounded(number)
        case ast.BinOp(left, ast.Pow(), right):
            base, exponent = _value(left), _value(right)
            if abs(exponent) > 1000 or abs(base) > 10**100:
                raise ValueError("the power is too large")
            return _bounded(base**exponent)
        case ast.BinOp(left, kind, right) if type(kind) in OPERATIONS:
            return _bounded(OPERATIONS[type(kind)](_value(left), _value(right)))
        case ast.UnaryOp(kind, operand) if type(kind) in OPERATIONS:
            return OPERATIONS[type(kind)](_value(operand))
        case ast.Call(ast.Name(name), arguments, []) if name in FUNCTIONS:
            return _bounded(FUNCTIONS[name](*map(_value, arguments)))
    raise ValueError(f"{ast.unparse(node)[:80]!r} is no arithmetic")


def _bounded(value: float | int) -> float | int:
    if isinstance(value, complex) or abs(value) > LARGEST:
        raise ValueError("the value is too large, or no real number")
    return value
