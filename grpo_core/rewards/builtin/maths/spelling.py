"""Write an answer in the one way that math-verify reads; recognise words, dates, times and bases."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from grpo_core.rewards.builtin.answers import DASHES, NEGATION
from grpo_core.rewards.builtin.chinese_japanese import CJK_UNIT, MYRIAD, POWERS

LONGEST = 1000  # characters of an answer

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
        "≈": r"\approx ",
        "±": r"\pm ",
        "∪": r"\cup ",
        "∅": r"\emptyset ",
        "°": r"^\circ ",
        "’": "'",
    }
)
RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
ROOT = re.compile(r"√\s*(?:(\d+(?:\.\d+)?|[A-Za-z])|\(([^()]*)\))")

FUNCTIONS = (
    "sin|cos|tan|log|ln|exp|sqrt|mod|pi|inf|infinity|infty|or|and|times|plus|minus|over|choose|squared|cubed|dozen"
)
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "bn": 9}
GREEK = "alpha|beta|gamma|theta|lambda|omega"
FONT = r"\\(?:underline|text|textbf|textit|textrm|mathrm|mathbf|mathit|mbox|operatorname)\s*"
NO_UNIT = rf"(?!\s*(?:{FUNCTIONS}|(?:{'|'.join(SCALES)})s?|{GREEK}|per ?cent|[ap]\.?\s*m)\b|[万萬亿億])"
UNIT = "[a-z]{3,}|[ckm]m|k?m/s|[km]g|ml|ft|in|lb|oz|(?-i:[NLJ])"
POWER = r"(?:\^\s*\{?\d\}?)?"

Rules = list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]]

ANYWHERE: Rules = [
    (re.compile(r"(\\(?:sqrt|[dt]?frac|binom))\s+(?=\{)"), r"\1"),
    (re.compile(r"(?<!\\)\\!"), ""),
    (re.compile(r"(?<!\\)\\[,;: ]|\\q?quad\b|~"), " "),
    (re.compile(r"\{([,:])\}"), r"\1"),  # 1{,}234
    (re.compile(r"(?<![\w.,])\d{1,3}(?: \d{3})+(?![\w,/])"), lambda number: number[0].replace(" ", "")),  # 1\,234
    (re.compile(r"(?<![\w.,^{/])(\d+) (\d+)/(\d+)(?![\w,/])"), lambda number: _mixed(*number.groups())),  # 1 1/2
    (re.compile(r"(?<![\w.,^{/])(\d+) ?\\[dt]?frac\{(\d+)\}\{(\d+)\}"), lambda number: _mixed(*number.groups())),
    (re.compile(r"(?<![A-Za-z}\]_^\\])\{([^{}]*)\}(?![_^])"), r"(\1)"),  # 1{71}
    (  # 2(3), which math-verify takes for 2 + 3
        re.compile(r"(?<=[\d)])(?<![_^]\d)\s*(?=[(\[])|(?<=\))\s*(?=\d)"),
        r"\\cdot ",
    ),
    (re.compile(r"(?<![\w.])([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d+)\b"), r"\1*10^{\2}"),  # 1e3
    (re.compile(r"(?<=\d)\s*x\s*(?=10\^)"), r" \\times "),  # 5 x 10^4
    (re.compile(r"\^(-\d+)"), r"^{\1}"),  # 10^-3
    (re.compile(r"\\sqrt\s*(\d+)"), r"\\sqrt{\1}"),  # \sqrt16
    (re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(rf"(?<=\d)\s*({GREEK})\b(?!\s*[a-z])"), r"\\\1"),
    (re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}"), lambda number: _repeating(*number.groups())),
    (re.compile(rf"(?<=\d)\s*({'|'.join(SCALES)})s?\b"), lambda scale: rf" \cdot 10^{{{SCALES[scale[1]]}}}"),
    (MYRIAD, lambda scale: f" \\cdot 10^{{{POWERS[scale[1]]}}}"),
    (re.compile(r"\s*\b(?:percent|per cent)\b"), r"\\%"),
    (re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])"), r"\\pi"),
    (re.compile(r"\\varnothing\b"), r"\\emptyset"),
]
LEAD = re.compile(r"(?i)\A[a-z ]*\b(?:is|are|equals|about|approximately|exactly)\b[\s:]*|\A[a-z ]*\banswer\s*[:=]\s*")
ALONE: Rules = [
    (re.compile(r"(?i)\A(?:thus|therefore|hence|so|then|finally),\s*"), ""),
    (re.compile(rf"(?<=\d)\s*\^\s*\{{\s*(?:{FONT}\{{)?\s*(?:st|nd|rd|th)\s*\}}?\s*\}}\Z"), ""),  # 12^{\text{th}}
    (re.compile(r"\A\\[(\[](.*)\\[)\]]\Z|\A\$\$?([^$]*)\$\$?\Z", re.DOTALL), r"\1\2"),
    (
        re.compile(
            rf"(?:(?<=[\d}})])|(?<=circ)|(?<=\\pi))(?:\s|\\[,;: ]|~)*{FONT}\{{{NO_UNIT}[^{{}}\d]*\}}{POWER}\Z", re.I
        ),
        "",
    ),  # \text{ cm}^2
    (re.compile(rf"{FONT}\{{([^{{}}]*)\}}"), r" \1 "),
    (re.compile(r"(?<=\d) \([A-Za-z -]+\)\Z"), ""),  # 72 (seventy-two)
    *ANYWHERE,
    (re.compile(r"\A[\s*_`]+|[\s*_`.,;:?]+\Z"), ""),
    (LEAD, ""),
    (re.compile(r"\\?\$|[€£¥₹]\s*|\A(?:USD|EUR|GBP|INR|Rs)\b\.?\s*"), ""),
    (
        re.compile(
            rf"(?<=[\d}})])\s+{NO_UNIT}(?:{UNIT})\b[a-z/ .]*{POWER}\Z",  # 72 apples
            re.I,
        ),
        "",
    ),
    (re.compile(rf"(?<=[\d}})%])\s*{CJK_UNIT}\Z"), ""),  # 72个苹果
    (re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?\s*[CF]?\Z"), ""),
    (re.compile(r"\A\(?\s*([A-Za-z])\s*\)\Z"), r"\1"),  # (A)
    (re.compile(r"(?<=\d)_\{?10\}?\Z"), ""),
]
JUXTAPOSED = re.compile(r"(?<![_^\d.])\d[\d.]*\s+\d|\)\s*\{|\A(?!.*\\begin).*\d\s*\\\\\s*\d")

PHRASE = re.compile(r"[^\W\d_]+|(?:[^\W\d_]+|\d+)(?:[\s,.'-]+(?:[^\W\d_]+|\d+))*")
DATE = re.compile(r"(?<![\w/-])(?:(\d{4})([-/.])(\d\d?)\2(\d\d?)|(\d\d?)([-/.])(\d\d?)\6(\d{4}))(?![\w/-])")
TIME = re.compile(r"(?i)(?<![\w:])([01]?\d|2[0-4]):([0-5]\d)(?::([0-5]\d))?(?![\d:])(?:\s*([ap])\.?\s?m\b\.?)?")
NUMERAL = r"(\d[\da-f]*|[\da-f]+(?=\)?_\{?16))"
BASED = re.compile(rf"(?i)(?<![\w.])(?:\(?{NUMERAL}\)?_(?:\{{\s*(\d+|[a-z]+)\s*\}}|(\d+))|0([xbo])([\da-f]+))(?![\w.])")
BASES = {"two": "2", "three": "3", "five": "5", "eight": "8", "sixteen": "16", "b": "2", "o": "8", "x": "16"}


def plain(text: str) -> str:
    """Write digits of any script as 0 to 9, symbols as LaTeX, full-width letters as plain ones."""
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


def normalize_text(text: str) -> str:
    """Write numbers, roots and products in one spelling, wherever they stand in the text."""
    for pattern, spelling in ANYWHERE:
        text = pattern.sub(spelling, text)
    return text


def normalize_answer(answer: str) -> str:
    """Write an answer by itself in one spelling, without its unit; "" if too long or with two numbers side by side."""
    if len(answer) > LONGEST:
        return ""
    answer = answer.strip()
    if NEGATION.search(answer):
        return LEAD.sub("", re.sub(rf"{FONT}\{{([^{{}}]*)\}}", r"\1", answer)).strip(" .")
    for pattern, spelling in ALONE:
        answer = pattern.sub(spelling, answer).strip()
    return "" if JUXTAPOSED.search(answer) else answer


def _mixed(whole: str, numerator: str, denominator: str) -> str:
    return f"\\frac{{{int(whole) * int(denominator) + int(numerator)}}}{{{denominator}}}"


def _repeating(whole: str, once: str, again: str) -> str:
    nines = 10 ** len(once) * (10 ** len(again) - 1)
    return f"\\frac{{{int(whole + once + again) - int((whole + once) or 0)}}}{{{nines}}}"


def words(answer: str) -> str | None:
    """Form in which words or one letter are compared, else None: as written; as a product they equal their anagrams."""
    if not PHRASE.fullmatch(answer):
        return None
    letters = [word for word in re.findall(r"[^\W\d_]+", answer) if not re.fullmatch(FUNCTIONS, word, re.I)]
    if not letters or (max(map(len, letters)) == 1 and len(answer) > 1):  # x y is a product
        return None
    return " ".join(re.findall(r"[^\W_]+", answer.casefold()))


def dated_or_based(text: str, whole: bool = True) -> str | None:
    """Form in which a date, a time or a number with its base is compared, else None; the last one in the text if not
    `whole`."""
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
