"""Find the statement of the answer in a text."""

from __future__ import annotations

import re
from typing import NamedTuple

from grpo_core.rewards.builtin.answers import NEGATION
from grpo_core.rewards.builtin.chinese_japanese import (
    CJK,
    NOT,
    concluded_answer,
    has_unclear_number,
    stated_answer,
)
from grpo_core.rewards.builtin.maths.spelling import (
    FUNCTIONS,
    JUXTAPOSED,
    LONGEST,
    normalize_answer,
    normalize_text,
    plain,
    words,
)

PROSE = 2000  # characters, counted from the end, among which a number is looked for

BRACE = re.compile(r"\\f?box(?:ed)?\s*\{|[{}]")
BESIDE = re.compile(r"(?:\\text|\\quad|and|or|[\s$.,;&{}])*")  # all that may stand between boxes that are one answer
DENIED = re.compile(r"(?:\bnot|n't|不是|并非|不等于|不为)\s*[$(\[\\]*\Z")
FINAL = re.compile(r"(?i)\bfinal answer\b[^.\n]{0,100}?\bis\b[\s:]*(?=[$\d+-]|\\[(\[])")
STATED = re.compile(r"(?i)\banswer\b[^.:=\n]{0,40}?(?:\bis\b|\bbe\b|[:=])[\s*:]*|####")
SENTENCE_END = re.compile(r"[.!?](?=[\s*]|\Z)|\n")
CLAUSE_END = re.compile(
    r"([.;:!?,](?=\s|\Z)|\n|\b(?:so|because|since|as|and|while|but|then|therefore|thus|hence|which)\b)"
)
LATEX = re.compile(r"\$|\\\(|\\\[|\\f?box(?:ed)?\b")
LETTERS = re.compile(rf"(?<![^\s({{])(?!(?:{FUNCTIONS})\b)[A-Za-z]{{2,}}(?![^\s.,;:!?)}}])")
SMALL_WORD = re.compile(r"(?i)\b(?:is|it|so|we|he|to|be|an|at|by|in|my|of|on|as)\b|[a-z]{3,}:")
OR = r"[^\d.$\n]{0,12}\bor\b[^\d.$\n]{0,12}"
SEVERAL = re.compile(
    rf"(?<![\w.])([-+]?\d[\d.]*(?:, \d[\d.]*)*){OR}(?<=[ (])([-+]?\d+(?:\.\d+)?)"
)  # 71, 72 or maybe 73
SEVERAL_LATEX = re.compile(rf"(\$[^$\n]+\$){OR}(?=\$[^$\n]+\$)")

REASON = re.compile(r",\s+(?:since|because)\b")
WHO_NOT = re.compile(r"(?i)\bwho\s+(?:[a-z]+\s+not|[a-z]+n't)\b(?!\s*[$(\[\\]*\d)")
MARKUP = re.compile(r"(?i)</?(?:b|i|u|em|strong|span|p)>")
COUNT = "(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|twenty|thirty|forty|fifty)"
UNREAD = re.compile(  # what changes a number and is written in words
    r"(?i)\d(?:[\s}]|\\text\{)*(?:"
    rf"\b(?:plus|minus|times|over|or|(?:divided|multiplied)\s+by|(?:square\s+)?root(?:\s+of)?)\s+{COUNT}\b"
    r"|\b(?:half|halves|thirds|fourths|fifths|sixths|sevenths|eighths|ninths|tenths|hundredths|thousandths)\b"
    r"|\b(?:and\s+a\s+half|below\s+zero|(?:less|more)\s+than\s+\S*\d|if\s)"
    r")|\d\s*\\(?:text|mathrm)\{(?-i:[MBk])\}"
    r"|\bbetween\s+\S*\d\S*\s+and\s+\S*\d\W*\Z"
)
ROW = re.compile(r"(?<![\w.,])\d+(?:\s+\d+){2,}\W*\Z")


class Statement(NamedTuple):
    """The final answer of a text: by itself, and the prose in which math-verify may look for it otherwise."""

    answer: str
    prose: tuple[str, ...] = ()


def final_statement(text: str) -> Statement:
    """The answer of a text: the content of its last box, else what "the answer is" introduces, else the last line.

    Boxes side by side are one answer. Outside of boxes, clauses with a negation ("not 72", "72 is wrong") say nothing.
    """
    text = WHO_NOT.sub("who", MARKUP.sub("", plain(text).replace("\\$", "")))
    boxed, end = _last_boxes(text)
    final = list(FINAL.finditer(text, end))
    if boxed is not None and not final:
        return Statement("" if UNREAD.search(boxed[:LONGEST]) else normalize_answer(boxed))
    last = text.strip().rpartition("\n")[2]
    text = text[final[-1].start() :] if final else text
    if not text.isascii():
        marked = max((found.end() for found in STATED.finditer(text)), default=0)
        answer = stated_answer(text[marked:]) or (None if marked else concluded_answer(text))
        text = text if answer is None else f"The answer is {answer}"
    clauses = CLAUSE_END.split(text)
    text = "".join("" if NEGATION.search(clause) or NOT.search(clause) else clause for clause in clauses).strip()
    prose = _as_sets(normalize_text(text[-PROSE:]))
    # "no solution" is an answer.
    if NEGATION.search(last) and words(normalize_answer(last)) and not re.search(r"\d", last):
        return Statement(normalize_answer(last), (prose,))
    stated = list(STATED.finditer(text))
    line = text.rpartition("\n")[2][-LONGEST:]
    if not stated and (UNREAD.search(line) or ROW.search(normalize_text(line))):
        return Statement("")
    if not stated and (has_unclear_number(line) or has_unclear_number(text[-PROSE:])):
        alone = normalize_answer(line)
        return Statement("" if re.search(f"[{CJK}]", alone) else alone)
    if not stated:
        return Statement(_unless_several(text.rpartition("\n")[2]), (prose,))
    sentence = SENTENCE_END.split(text[stated[-1].end() :].strip(), maxsplit=1)[0]
    sentence = REASON.split(sentence[:LONGEST], maxsplit=1)[0]
    if UNREAD.search(sentence) or JUXTAPOSED.search(normalize_text(sentence)):
        return Statement("")
    return Statement(_unless_several(sentence), (_as_sets(normalize_text(f"The answer is {sentence}")), prose))


def is_expression(answer: str) -> bool:
    """True if an answer is nothing but mathematics."""
    is_prose = (
        (words(answer) or "")[1:]
        or SMALL_WORD.search(answer)
        or len(LETTERS.findall(re.sub(r"\\(?:begin|end)\{\w+\}", "", answer))) > 1
    )
    return bool(answer) and not is_prose and not LATEX.search(answer)


def _unless_several(answer: str) -> str:
    return "" if SEVERAL.search(answer) or SEVERAL_LATEX.search(answer) else normalize_answer(answer)


def _as_sets(text: str) -> str:
    """Write alternatives such as "71 or 72" as a set, which no single number equals."""
    return SEVERAL_LATEX.sub(r"\1 or ", SEVERAL.sub(r" $\1, \2$ ", text))


def _last_boxes(text: str) -> tuple[str | None, int]:
    """Contents of the last box and of those side by side with it, None without a box; and the place where they end."""
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
    if not boxes:
        return None, 0
    contents = [boxes[-1][2]]
    for (_, end, content), (start, _, _) in zip(boxes[-2::-1], boxes[::-1], strict=False):
        if not BESIDE.fullmatch(text[end:start]):
            break
        contents.insert(0, content)
    return ", ".join(dict.fromkeys(contents)), boxes[-1][1]
