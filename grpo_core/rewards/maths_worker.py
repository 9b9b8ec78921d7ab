"""Compares mathematical answers, a line of JSON [completion, answer] each: answers 1.0, 0.0 or null.

A child does the work, and is ended by the system when it takes too long for an answer, which is wrong then; the next
child goes on with the next line.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
import resource
import signal
import sys
from typing import Any

SECONDS = 2.0  # of CPU time for an answer
MEMORY = 2 << 30  # bytes
DELIMITERS = re.compile(r"\$|\\\(|\\\[|\\boxed\b")
MIXED = re.compile(r"(?<![\d.,/^{])(\d+) (\d+)/(\d+)(?![\d.,/])")
PROSE = re.compile(r"(?<!\\)(?<![A-Za-z])[A-Za-z]{2,}")
WORD = re.compile(r"(?!(?i:infinity)$)[A-Za-z]{3,}")  # read as a product of variables, which any anagram equals
EXPONENT = re.compile(r"(?<![\w.])([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d+)\b")


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
        if os.waitpid(child, 0)[1] == 0:
            return
        _answer(0.0)


def _serve() -> None:
    while line := sys.stdin.readline():
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
        try:
            verdict = compare(*json.loads(line))
        except Exception:  # sympy fails in many ways
            verdict = 0.0
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(verdict)


def _answer(verdict: float | None) -> None:
    sys.stdout.write(json.dumps(verdict) + "\n")
    sys.stdout.flush()


def compare(text: str, answer: str) -> float | None:
    """1 when the text's answer is equal to the right one, 0 when it is not, None when the right one cannot be read."""
    from math_verify import verify

    expected = _expected(answer)
    if not expected:
        return None
    found = _read(text)
    if not found or not verify(expected, found, timeout_seconds=None):
        return 0.0
    return float(_is_near(expected[0], found[0]))


@functools.lru_cache(maxsize=1024)
def _expected(answer: str) -> list[Any]:
    if WORD.fullmatch(answer.strip()):
        return _parsed(f"\\boxed{{\\text{{{answer.strip()}}}}}")
    return ([] if DELIMITERS.search(answer) else _parsed(f"\\boxed{{{answer.strip()}}}")) or _read(answer)


def _read(text: str) -> list[Any]:
    """The one expression that math-verify finds in the text, or that the whole text is when it is bare LaTeX."""
    plain = EXPONENT.sub(r"\1*10^(\2)", MIXED.sub(r"(\1+\2/\3)", text.replace("\\$", "").strip()))
    if DELIMITERS.search(plain):
        return _parsed(plain)
    readings = [plain, f"\\boxed{{{plain}}}"]
    if "\\" in plain and not PROSE.search(plain):  # in 2\sqrt{3} there is no number 3 to be found
        readings.reverse()
    return _parsed(readings[0]) or _parsed(readings[1])


def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    # No fallback to text, and the first only: another one would be a second answer.
    return parse(text, fallback_mode="no_fallback", parsing_timeout=None)[:1]


def _is_near(expected: Any, found: Any) -> bool:
    """Whether two real numbers agree to five digits; math-verify rounds to six decimals, and calls 1e-7 and 0 equal.

    Percentages count with and without their sign. True for what is no real number.
    """
    try:
        wanted, given = float(expected.evalf()), float(found.evalf())
    except (TypeError, ValueError, AttributeError):
        return True
    return any(math.isclose(given * scale, wanted, rel_tol=1e-5) for scale in (1, 100, 0.01))


if __name__ == "__main__":
    main()
