"""Compare mathematical answers: read lines of JSON [seconds, completion, answer, relative tolerance].

Write [1.0, 0.0 or null, seconds of CPU time] for each.

A child does the work. If an answer takes longer than its seconds, the system ends the child, the answer counts as
wrong, and the next child continues with the next line.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from grpo_core.rewards.builtin.answers import NEGATION
from grpo_core.rewards.builtin.maths.spelling import dated_or_based, normalize_answer, plain, words
from grpo_core.rewards.builtin.maths.text import LATEX, final_statement, is_expression

MEMORY = 2 << 30  # bytes
DIGITS = 5e-5  # relative difference allowed between a decimal and a number without a last digit, as 3.1416 and pi
NOISE = 1e-6  # absolute difference allowed between two decimals
ROUGHLY = 0.01  # relative difference allowed in an equation such as 22/7 = 3.14
AS_WRITTEN = object()
DEEPEST = 50  # brackets within brackets
REPEATED = re.compile(r"([^\n]{0,20}?[|^_\\([{][^\n]{0,20}?)\1{40}")  # |x||x||x|
TOWER = re.compile(r"(?:\^[\s{(]*(?:\d+|\w)[\s})]*){8}")
SET = re.compile(r"\\?\{.*\}")
TUPLE = re.compile(r"\([^()]*,[^()]*\)")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training, whose end is the end of the input
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable()
    compare("0.5", r"\frac{1}{2}")  # what is loaded and built here need not be in each child
    while True:
        child = os.fork()
        if child == 0:
            _serve()
            os._exit(0)
        _, status, used = os.wait4(child, 0)
        if status == 0:
            return
        _answer(0.0, used.ru_utime + used.ru_stime)


def _serve() -> None:
    while line := sys.stdin.readline():
        seconds, *question = json.loads(line)
        begun = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        try:
            verdict = compare(*question)
        except Exception:  # sympy fails in many ways
            verdict = 0.0
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(verdict, time.process_time() - begun)


def _answer(verdict: float | None, seconds: float) -> None:
    sys.stdout.write(json.dumps([verdict, seconds]) + "\n")
    sys.stdout.flush()


def compare(text: str, answer: str, tolerance: float = 0.0) -> float | None:
    """1 if the text's answer is equal to the right one, 0 if it is not, None if the right one cannot be read."""
    wanted, expected = _expected(answer)
    if expected is None:
        return None
    given, prose = final_statement(text)
    if expected is AS_WRITTEN or dated_or_based(given):
        written = dated_or_based(given) or (dated_or_based(prose[0], whole=False) if prose else None)
        return float(dated_or_based(wanted) == written)
    if (wanted_words := words(wanted)) and (given_words := words(given)):
        return float(wanted_words == given_words)
    if (SET.fullmatch(wanted) and TUPLE.fullmatch(given)) or (TUPLE.fullmatch(wanted) and SET.fullmatch(given)):
        return 0.0
    found = [
        _expression(part, prose, _has_unit(wanted)) for part in given.split(r"\approx") if part.strip() or not given
    ]
    if None in found or not all(map(_equations_hold, found)) or not _numbers_agree(list(map(_right_side, found))):
        return 0.0
    return float(any(_is_equal(expected, part, tolerance) for part in found))


@functools.lru_cache(maxsize=1024)
def _expected(answer: str) -> tuple[str, Any]:
    """The right answer as text and as an expression: AS_WRITTEN for dates, times and bases, None if unreadable."""
    wanted = normalize_answer(plain(answer))
    if dated_or_based(wanted):
        return wanted, AS_WRITTEN
    if (wanted_words := words(wanted)) and len(wanted_words) > 1:
        return wanted, _parsed(f"\\boxed{{\\text{{{wanted_words}}}}}") or wanted
    if is_expression(wanted) and (expected := _parsed(f"\\boxed{{{wanted}}}", _has_unit(wanted))) is not None:
        return wanted, expected
    given, prose = final_statement(answer)
    return given, _expression(given, prose, _has_unit(given))


def _has_unit(wanted: str) -> bool:
    """True if a last letter may be a unit: m in 5 m, but not t in 2t."""
    return not re.search(r"[\d}][A-Za-z]\Z", wanted)


def _expression(answer: str, prose: tuple[str, ...], has_unit: bool) -> Any:
    """The answer by itself if it is an expression, else what math-verify finds in the prose."""
    boxed = [f"\\boxed{{{answer}}}"] if answer and not NEGATION.search(answer) and not LATEX.search(answer) else []
    readings = [*boxed, *prose] if is_expression(answer) else [*prose, *boxed]
    return next((found for reading in readings if (found := _parsed(reading, has_unit)) is not None), None)


def _parsed(text: str, has_unit: bool = True) -> Any:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    if _is_degenerate(text):
        return None
    latex = LatexExtractionConfig()
    latex = replace(latex, normalization_config=replace(latex.normalization_config, units=has_unit))
    # No fallback to text, and the first only: another one would be a second answer.
    found = parse(text, [latex, ExprExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
    return found[0] if found else None


def _is_degenerate(text: str) -> bool:
    """True if a text is nested or repeats itself so much that reading it would take too long."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest > DEEPEST or bool(REPEATED.search(text) or TOWER.search(text))


def _equations_hold(found: Any) -> bool:
    """True if the numbers in each chain of equations are equal: 5 = 4 and 72 = x = 73 are no answers."""
    from sympy import And, Basic, Eq

    chains = (found.atoms(And) or found.atoms(Eq)) if isinstance(found, Basic) else ()
    return all(_numbers_agree([side for equation in chain.atoms(Eq) for side in equation.args]) for chain in chains)


def _numbers_agree(expressions: Sequence[Any]) -> bool:
    """True if those of the expressions that are numbers are equal, roughly if one is a decimal."""
    from sympy import Float

    numbers = [expression for expression in expressions if _real_value(expression) is not None]
    roughly = ROUGHLY if any(number.has(Float) for number in numbers) else 0.0
    return all(_same_number(numbers[0], number, roughly) for number in numbers)


def _is_equal(expected: Any, found: Any, tolerance: float) -> bool:
    """Compare by the rule for numbers if both are real numbers (x = 5 is 5), else by math-verify's."""
    from math_verify import verify

    wanted, given = (
        (expected, found) if _is_equation(expected) == _is_equation(found) else map(_right_side, (expected, found))
    )
    if _real_value(wanted) is None or _real_value(given) is None:
        return verify(expected, found, allow_set_relation_comp=True, timeout_seconds=None)
    (wanted, wanted_percent), (given, given_percent) = _without_percent(wanted), _without_percent(given)
    pairs = [(wanted, given)]
    if wanted_percent != given_percent:  # 50 % counts as 50 and as 0.5
        pairs.append((wanted, given / 100) if given_percent else (wanted / 100, given))
    return any(_same_number(*pair, tolerance) for pair in pairs)


def _same_number(wanted: Any, given: Any, tolerance: float) -> bool:
    """True if two real numbers are equal: exactly if neither is a decimal, else within DIGITS or NOISE."""
    from math_verify import verify
    from sympy import Float

    size, difference = abs(_real_value(wanted)), abs(_real_value(wanted) - _real_value(given))
    if difference <= tolerance * size:
        return True
    if not wanted.has(Float) and not given.has(Float):
        return difference <= DIGITS * size and verify(wanted, given, timeout_seconds=None)
    if _has_last_digit(wanted) and _has_last_digit(given):
        return difference <= max(min(NOISE, DIGITS * size), 1e-12 * size)
    return difference <= DIGITS * size


def _has_last_digit(number: Any) -> bool:
    """True if a number can be written out as a decimal: 1/8, but not 1/3 or the root of 2."""
    number = number.doit()
    return number.is_Float or (number.is_Rational and pow(10, int(number.q).bit_length(), int(number.q)) == 0)


def _real_value(expression: Any) -> Any:
    """The value of an expression without symbols to 30 digits; None if it is not a finite real number."""
    try:
        value = expression.doit().evalf(30)
        return value if (value.is_Float and value.is_finite) or value.is_Integer else None
    except (AttributeError, TypeError, ValueError):
        return None


def _is_equation(expression: Any) -> bool:
    from math_verify.grader import is_equation

    return is_equation(expression)


def _right_side(expression: Any) -> Any:
    from math_verify.grader import take_last_relation

    return take_last_relation(expression).rhs if _is_equation(expression) else expression


def _without_percent(expression: Any) -> tuple[Any, bool]:
    from sympy import Mul, Rational, UnevaluatedExpr

    sign = UnevaluatedExpr(Rational(1, 100))
    if not isinstance(expression, Mul) or sign not in expression.args:
        return expression, False
    return Mul(*(factor for factor in expression.args if factor != sign)), True


if __name__ == "__main__":
    main()
