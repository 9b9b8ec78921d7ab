"""Finds the answer in a text and writes it as math-verify reads it; knows words, dates, times and bases."""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

from grpo_core.rewards.answers import DASHES, NEGATION

LONGEST = 1000  # characters of an answer
PROSE = 2000  # characters, counted from the end, among which a number is looked for

SYMBOLS = str.maketrans(
    {
        "×": r"\times ",
        "·": r"\cdot ",
        "÷": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\leq ",
        "≥": r"\geq ",
        "≠": r"\neq ",
        "±": r"\pm ",
        "∪": r"\cup ",
        "∅": r"\emptyset ",
        "°": r"^\circ ",
        "’": "'",
    }
)
RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
ROOT = re.compile(r"√\s*(?:(\d+(?:\.\d+)?|[A-Za-z])|\(([^()]*)\))")

# Where an answer stands.
BRACE = re.compile(r"\\f?box(?:ed)?\s*\{|[{}]")
BESIDE = re.compile(r"(?:\\text|\\quad|and|or|[\s$.,;&{}])*")  # all that may stand between boxes that are one answer
DENIED = re.compile(r"(?:\bnot|n't)\s*[$(\[\\]*\Z")
FINAL = re.compile(r"(?i)\bfinal answer\b[^.\n]{0,100}?\bis\b[\s:]*(?=[$\d+-]|\\[(\[])")
STATED = re.compile(r"(?i)\banswer\b[^.:=\n]{0,40}?(?:\bis\b|\bbe\b|[:=])[\s*:]*|####")
SENTENCE_END = re.compile(r"[.!?](?=[\s*]|\Z)|\n")
CLAUSE_END = re.compile(
    r"([.;:!?,](?=\s|\Z)|\n|\b(?:so|because|since|as|and|while|but|then|therefore|thus|hence|which)\b)"
)
LATEX = re.compile(r"\$|\\\(|\\\[|\\f?box(?:ed)?\b")
FUNCTIONS = "sin|cos|tan|log|ln|exp|sqrt|mod|pi|inf|infinity|infty|or|and|times|plus|minus|over|choose"
LETTERS = re.compile(rf"(?<![^\s({{])(?!(?:{FUNCTIONS})\b)[A-Za-z]{{2,}}(?![^\s.,;:!?)}}])")
SMALL_WORD = re.compile(r"(?i)\b(?:is|it|so|we|he|to|be|an|at|by|in|my|of|on|as)\b|[a-z]{3,}:")
SEVERAL = re.compile(r"(?<![\w.])([-+]?\d[\d.]*(?:, \d[\d.]*)*),? or ([-+]?\d+(?:\.\d+)?)")

# How an answer is written: first what holds anywhere, then what holds for an answer alone.
FONT = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\s*"
SCALES = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SPELLINGS = [
    (re.compile(r"\\!"), ""),
    (re.compile(r"\\[,;: ]|\\q?quad\b|~"), " "),
    (re.compile(r"\{([,:])\}"), r"\1"),  # 1{,}234
    (re.compile(r"(?<![\w.,])\d{1,3}(?: \d{3})+(?![\w,/])"), lambda number: number[0].replace(" ", "")),  # 1\,234
    (re.compile(r"(?<![\w.,^{/])(\d+) (\d+)/(\d+)(?![\w,/])"), r"(\1+\2/\3)"),  # 1 1/2
    (re.compile(r"(?<![\w.])([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d+)\b"), r"\1*10^{\2}"),  # 1e3
    (re.compile(r"(?<=\d)\s*x\s*(?=10\^)"), r" \\times "),  # 5 x 10^4
    (re.compile(r"\^(-\d+)"), r"^{\1}"),  # 10^-3
    (re.compile(r"\\sqrt\s*(\d+)"), r"\\sqrt{\1}"),  # \sqrt16
    (re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}"), lambda number: _repeating(*number.groups())),  # 0.\overline{3}
    (re.compile(r"\\varnothing\b"), r"\\emptyset"),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi"),
    (re.compile(rf"(?<=\d)\s*({'|'.join(SCALES)})\b"), lambda scale: rf" \cdot 10^{{{SCALES[scale[1]]}}}"),
]
ALONE = [
    (re.compile(r"\A\\[(\[](.*)\\[)\]]\Z|\A\$\$?([^$]*)\$\$?\Z", re.DOTALL), r"\1\2"),
    (
        re.compile(
            rf"(?<=[\d}})])\s*{FONT}\{{(?!\s*(?:{'|'.join(SCALES)}|[ap]\.?\s*m\b))[^{{}}\d]*\}}(?:\^\{{?\d\}}?)?\Z",
            re.I,
        ),
        "",
    ),
    (re.compile(rf"{FONT}\{{([^{{}}]*)\}}"), r" \1 "),
    *SPELLINGS,
    (re.compile(r"\A[\s*_`]+|[\s*_`.,;:?]+\Z"), ""),
    (re.compile(r"\A[A-Za-z ]*\b(?:is|are|equals)\b[\s:]*|\A[A-Za-z ]*\banswer\s*[:=]\s*", re.I), ""),
    (re.compile(r"\\?\$|[€£¥₹]\s*"), ""),
    (
        re.compile(
            rf"(?<=[\d}})])\s+(?!{FUNCTIONS})(?:[a-z]{{3,}}|[ckm]m|[km]g|ml|ft|in|lb|oz)\b[a-z/ .]*(?:\^\{{?\d\}}?)?\Z",
            re.I,
        ),
        "",
    ),
    (re.compile(r"\A\(\s*([A-Za-z])\s*\)\Z"), r"\1"),  # (A)
    (re.compile(r"(?<=\d)_\{?10\}?\Z"), ""),
]
JUXTAPOSED = re.compile(r"(?<![_^\d.])\d[\d.]*\s+\d")

PHRASE = re.compile(r"[^\W\d_]+|(?:[^\W\d_]+|\d+)(?:[\s,.'-]+(?:[^\W\d_]+|\d+))*")
DATE = re.compile(r"(?<![\w/-])(?:(\d{4})([-/.])(\d\d?)\2(\d\d?)|(\d\d?)([-/.])(\d\d?)\6(\d{4}))(?![\w/-])")
TIME = re.compile(r"(?i)(?<![\w:])([01]?\d|2[0-4]):([0-5]\d)(?::([0-5]\d))?(?![\d:])(?:\s*([ap])\.?\s?m\b\.?)?")
BASED = re.compile(
    r"(?i)(?<![\w.])(?:\(?(\d[\da-f]*|[\da-f]+(?=\)?_\{?16))\)?_(?:\{\s*(\d+|[a-z]+)\s*\}|(\d+))|0([xbo])([\da-f]+))(?![\w.])"
)
BASES = {"two": "2", "three": "3", "five": "5", "eight": "8", "sixteen": "16", "b": "2", "o": "8", "x": "16"}


class Statement(NamedTuple):
    """What a text says last: the answer by itself, and the prose in which math-verify may look for it otherwise."""

    answer: str
    prose: tuple[str, ...] = ()


def final_statement(text: str) -> Statement:
    """The answer of a text: the content of its last box, else what "the answer is" introduces, else the last line.

    Boxes side by side are one answer. Outside of boxes, clauses with a negation ("not 72", "72 is wrong") say nothing.
    """
    text = plain(text).replace("\\$", "")
    boxed, end = _last_boxes(text)
    final = list(FINAL.finditer(text, end))
    if boxed and not final:
        return Statement(alone(boxed))
    clauses = CLAUSE_END.split(text[final[-1].start() :] if final else text)
    text = "".join("" if NEGATION.search(clause) else clause for clause in clauses).strip()
    prose = SEVERAL.sub(r"$\1, \2$", _spelled(text[-PROSE:]))
    if stated := list(STATED.finditer(text)):
        sentence = SENTENCE_END.split(text[stated[-1].end() :].strip(), maxsplit=1)[0]
        return Statement(alone(sentence), (SEVERAL.sub(r"$\1, \2$", "The answer is " + _spelled(sentence)), prose))
    return Statement(alone(text.rpartition("\n")[2]), (prose,))


def plain(text: str) -> str:
    """Digits of any script as 0 to 9, symbols as LaTeX, full-width letters as plain ones."""
    if text.isascii():
        return text
    text = RAISED.sub(lambda run: "^{" + DASHES.sub("-", unicodedata.normalize("NFKC", run[0])) + "}", text)
    text = ROOT.sub(lambda root: f"\\sqrt{{{root[1] or root[2]}}}", DASHES.sub("-", text).translate(SYMBOLS))
    return "".join(character if character.isascii() else _ascii(character) for character in text)


def _ascii(character: str) -> str:
    if unicodedata.category(character) == "Nd":
        return str(unicodedata.decimal(character))
    normal = unicodedata.normalize("NFKC", character)
    numerator, bar, denominator = normal.partition("\u2044")  # of ½
    return f"\\frac{{{numerator}}}{{{denominator}}}" if bar else normal


def _last_boxes(text: str) -> tuple[str | None, int]:
    """Contents of the last box and of those side by side with it, None where there is no box; and where they end."""
    begun: list[tuple[bool, int, int]] = []
    boxes: list[tuple[int, int, str]] = []
    for brace in BRACE.finditer(text):
        if brace[0] != "}":
            begun.append((brace[0] != "{", brace.start(), brace.end()))
        elif begun:
            is_box, start, inside = begun.pop()
            if is_box and not (boxes and boxes[-1][0] > start):  # a box around a box adds nothing
                boxes.append((start, brace.end(), text[inside : brace.start()]))
    boxes = [box for box in boxes if not DENIED.search(text[max(0, box[0] - 20) : box[0]])]
    contents: list[str] = []
    for index in reversed(range(len(boxes))):
        if contents and not BESIDE.fullmatch(text[boxes[index][1] : boxes[index + 1][0]]):
            break
        contents.insert(0, boxes[index][2])
    return (", ".join(dict.fromkeys(contents)), boxes[-1][1]) if boxes else (None, 0)


def alone(answer: str) -> str:
    """An answer by itself in one spelling; empty if it is too long or has two numbers side by side."""
    if len(answer) > LONGEST:
        return ""
    answer = answer.strip()
    if NEGATION.search(answer):
        return re.sub(rf"{FONT}\{{([^{{}}]*)\}}", r"\1", answer).strip(" .")
    for pattern, spelling in ALONE:
        answer = pattern.sub(spelling, answer).strip()
    return "" if JUXTAPOSED.search(answer) else answer


def _spelled(text: str) -> str:
    for pattern, spelling in SPELLINGS:
        text = pattern.sub(spelling, text)
    return text


def _repeating(whole: str, once: str, again: str) -> str:
    nines = 10 ** len(once) * (10 ** len(again) - 1)
    return f"\\frac{{{int(whole + once + again) - int((whole + once) or 0)}}}{{{nines}}}"


def is_expression(answer: str) -> bool:
    """Whether an answer is nothing but mathematics."""
    is_prose = SMALL_WORD.search(answer) or len(LETTERS.findall(answer)) > 1
    return bool(answer) and not is_prose and not LATEX.search(answer)


def words(answer: str) -> str | None:
    """An answer of words or one letter, compared as it is written: as a product, it would equal its anagrams."""
    if not PHRASE.fullmatch(answer):
        return None
    letters = [word for word in re.findall(r"[^\W\d_]+", answer) if not re.fullmatch(FUNCTIONS, word, re.I)]
    if not letters or (max(map(len, letters)) == 1 and len(answer) > 1):  # x y is a product
        return None
    return " ".join(re.findall(r"[^\W_]+", answer.casefold()))


def dated_or_based(text: str, whole: bool = True) -> str | None:
    """A date, a time or a number with its base, compared as it is written; the last one in the text."""
    for pattern, form in ((DATE, _date), (TIME, _time), (BASED, _based)):
        found = [pattern.fullmatch(text)] if whole else list(pattern.finditer(text))[-1:]
        if found and found[0]:
            return form(found[0])
    return None


def _date(date: re.Match[str]) -> str:
    return "date " + " ".join(str(int(part)) for part in date.groups() if part and part.isdigit())


def _time(time: re.Match[str]) -> str:
    hour = int(time[1]) % 12 + 12 * (time[4] in "pP") if time[4] else int(time[1])
    return f"time {hour}:{time[2]}:{time[3] or '00'}"


def _based(number: re.Match[str]) -> str:
    base = (number[2] or number[3] or number[4]).lower()
    return f"base {BASES.get(base, base)} {(number[1] or number[5]).lstrip('0').lower()}"
