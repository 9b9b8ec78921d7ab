"""Whole-number arithmetic as bash computes it."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: _divided(left, right),
    ast.Mod: lambda left, right: left - right * _divided(left, right),
}


def whole_number(text: str) -> int | None:
    """Value of an expression of digits, parentheses and + - * / %; None for any other, and beyond 64 bits."""
    if not re.fullmatch(r"[\d\s()+*/%-]+", text):
        return None
    try:
        value = _whole(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None
    return value if abs(value) < 2**63 else None


def _divided(left: int, right: int) -> int:
    """Towards zero, as in C."""
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


def _whole(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_whole(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_whole(left), _whole(right))
    raise ValueError(ast.unparse(node))
