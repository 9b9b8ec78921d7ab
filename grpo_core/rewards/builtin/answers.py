"""Rewards for the right answer as text, number or letter; mathematics and JSON have modules of their own."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from decimal import Decimal, DecimalException, InvalidOperation
from typing import Any

from grpo_core.data.chat import text_of
from grpo_core.rewards.builtin.chinese_japanese import stated_answer
from grpo_core.rewards.builtin.record import BuiltinReward, Rewards, written

# A minus right after a digit, letter or closing bracket subtracts or ranges; it is not a sign.
NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-+])?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?)"
)
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
DASHES = re.compile("[\u2010-\u2015\u2212]")
# Signs that distinguish answers (group 1), and all other signs: -5, 3.5, 10-5, .5, 50 %, C#.
SIGN = re.compile(r"((?<!\w)-(?=\.?\d)|(?<=\d)[-.,:/](?=\d)|(?<!\w)\.(?=\d)|(?<=\w)[%#])|[^\w\s]|_")
ARTICLE = re.compile(r"\b(?:a|an|the)\b")

UNITS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEENS = ("ten", "eleven", "twelve", *(f"{it}teen" for it in ("thir", "four", "fif", "six", "seven", "eigh", "nine")))
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
IN_WORDS = {word: count for count, word in enumerate(("zero", *UNITS, *TEENS))} | {
    f"{ten}{unit}": count
    for first, ten in enumerate(TENS, 2)
    for count, unit in enumerate(("", *(f"-{it}" for it in UNITS)), 10 * first)
}
DOUBTFUL = {"one": 1, "no": 0, "none": 0}  # "the red one", "no doubt": read if there is no other number
LARGER = "hundred|thousand|million|dozen"  # no count that is read: "one hundred" is not one
COUNT = re.compile(  # a number in digits, neither in 3D nor in x2; or in words
    rf"(?<![a-z\d])(?>{NUMBER.pattern})(?![a-z])"
    rf"|\b(?:(?:{'|'.join(TENS)})[- ](?:{'|'.join(UNITS)})|{'|'.join(IN_WORDS | DOUBTFUL)}|(?:{LARGER})s?)\b"
)

# Places where a choice is stated, the strongest kind first.
BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
STATED = re.compile(r"(?i)\b(?:answer|choice|option)\b[^.:=\n]{0,40}?(?:\bis\b|\bbe\b|[:=])")
SENTENCE = 300  # characters that a stated choice may take with its reasons
BEFORE_CHOICE = re.compile(r"(?i)(?:\W|\\?text\w*|mathrm|mathbf|\b(?:option|choice|letter|answer|is|the)\b)*")
# A letter alone; "A dog", "I think" and "B cells" are words of a sentence, "A is right" is a choice.
LETTER = re.compile(
    r"(?<![\w'’])([A-J])(?![\w'’])(?! (?!is\b|was\b|as\b|and\b|or\b|because\b|since\b|which\b|for\b)[a-z])"
)
LONE = re.compile(r"\W*([A-Ja-j])\W*")
ANOTHER = re.compile(
    r"(?:\W|\b(?:or|and|nor|but|then|even|also|maybe|perhaps|possibly|both|option)\b)*([A-J])(?![\w'’]| is\b| was\b)"
)
NEGATION = re.compile(r"(?i)\b(?:not|no|none|neither|nor|never|cannot|except|wrong|incorrect|false|\w+n['’]t)\b")
END_OF_CLAUSE = re.compile(r"[.,;:!?\n]|\b(?:because|since|as|and|while|but)\b")


def exact_match(completions: Sequence[Any], answer: Sequence[str | int | float]) -> list[float | None]:
    """1 if the completion is the answer, ignoring white space around both, else 0; None without an answer."""
    return [
        None if expected is None else float(text_of(completion).strip() == written(expected).strip())
        for completion, expected in zip(completions, answer, strict=True)
    ]


def numeric_match(
    completions: Sequence[Any], answer: Sequence[str | int | float], tolerance: float = 0.0
) -> list[float | None]:
    """1 if the last number in the completion equals the answer within `tolerance`, else 0.

    Thousands separators, signs, decimals and exponents are read. None if the answer is missing or not a number.
    """
    return [
        _numbers_agree(text_of(completion), expected, tolerance)
        for completion, expected in zip(completions, answer, strict=True)
    ]


def _numbers_agree(text: str, expected: Any, tolerance: float) -> float | None:
    try:
        wanted = Decimal(DASHES.sub("-", str(expected)).strip().replace(",", ""))
    except InvalidOperation:
        return None
    if not wanted.is_finite():
        return None
    found = NUMBER.findall(DASHES.sub("-", text))
    if not found:
        return 0.0
    try:
        return float(abs(Decimal(found[-1].replace(",", "")) - wanted) <= Decimal(str(tolerance)))
    except DecimalException:  # an exponent beyond any answer's: 1e9999999
        return 0.0


def count_match(completions: Sequence[Any], answer: Sequence[str | int | float]) -> list[float | None]:
    """1 if the count that the completion states equals the answer, else 0.

    It is the last number of the last `\\boxed{}`, else of the last `<answer>`, else of the text: in digits, or in
    English words up to ninety-nine. "One", "no" and "none" are read if there is no other number. None if the answer is
    not a count: a whole number from 0.
    """
    return [
        None if (count := _as_count(expected)) is None else float(_stated_count(text_of(completion)) == count)
        for completion, expected in zip(completions, answer, strict=True)
    ]


def _as_count(expected: Any) -> Decimal | None:
    text = "" if expected is None else written(expected).strip().lower()
    count = _number(text) if COUNT.fullmatch(text) and text not in ("no", "none") else None
    return count if count is not None and count >= 0 and count == count.to_integral_value() else None


def _stated_count(text: str) -> Decimal | None:
    [said] = (BOXED.findall(text) or TAGGED.findall(text) or [text])[-1:]
    found = [match[0] for match in COUNT.finditer(DASHES.sub("-", said.lower()))]
    *_, last = [None, *(it for it in found if it in DOUBTFUL), *(it for it in found if it not in DOUBTFUL)]
    return _number(last) if last else None


def _number(said: str) -> Decimal | None:
    word = said.replace(" ", "-")
    if word in IN_WORDS | DOUBTFUL:
        return Decimal((IN_WORDS | DOUBTFUL)[word])
    try:
        return Decimal(said.replace(",", ""))
    except InvalidOperation:  # a larger word, or an exponent beyond any answer's: 1e99999999999999999999
        return None


def normalized_match(completions: Sequence[Any], answer: Sequence[str | int | float]) -> list[float | None]:
    """1 if the completion is the answer, ignoring case, articles, punctuation and white space, else 0; None without an
    answer.

    SQuAD's rule (arXiv:1606.05250) in Unicode, but stricter where that rule would call different answers the same:
    signs, points and the like in a number stay (-5, 3.5, 1/2, 10:30, 50%), as do symbols that are not punctuation (C++,
    5 €). If nothing would be left of a text, such as the answer "A", only case is ignored.
    """
    return [
        None
        if expected is None or not written(expected).strip()
        else float(_normalized(text_of(completion)) == _normalized(written(expected)))
        for completion, expected in zip(completions, answer, strict=True)
    ]


def _normalized(text: str) -> str:
    folded = unicodedata.normalize("NFC", "".join(map(_plain, text)).casefold())
    digits = THOUSANDS.sub("", DASHES.sub("-", folded))
    bare = SIGN.sub(lambda sign: "" if sign[1] is None and _is_punctuation(sign[0]) else sign[0], digits)
    return " ".join(ARTICLE.sub(" ", bare).split()) or folded.strip()


def _plain(character: str) -> str:
    """Replace full-width and joined letters by plain ones; 10² and 1½ stay, since they are not 102 and 11/2."""
    if unicodedata.category(character) == "Cf":  # invisible: joiners, soft hyphens
        return ""
    raised = unicodedata.decomposition(character).startswith(("<super>", "<sub>", "<fraction>"))
    return character if raised else unicodedata.normalize("NFKC", character)


def _is_punctuation(character: str) -> bool:
    return unicodedata.category(character)[0] == "P" or character in "`^"


def multiple_choice(completions: Sequence[Any], answer: Sequence[str]) -> list[float | None]:
    """1 if the completion chooses the answer's letter (A to J), else 0; None if the answer is not such a letter.

    The choice is read from the last `\\boxed{}`, else the last `<answer>`, else the last sentence like "the answer is
    (B)", else the last line. Several letters ("A or B"), a negated one ("not B") and a word ("A dog") choose nothing.
    """
    return [
        float(_chosen_letter(text_of(completion)) == letter[1].upper())
        if (letter := LONE.fullmatch(str(expected)))
        else None
        for completion, expected in zip(completions, answer, strict=True)
    ]


def _chosen_letter(text: str) -> str | None:
    plain = re.sub(r"[*_`]+", "", text).strip()
    stated = [plain[head.end() : head.end() + SENTENCE].lstrip().partition("\n")[0] for head in STATED.finditer(plain)]
    if not plain.isascii() and (answer := stated_answer(unicodedata.normalize("NFKC", plain))):
        stated.append(answer)
    for places in (BOXED.findall(plain), TAGGED.findall(plain), stated):
        for said in reversed(places):
            if LETTER.search(said) or LONE.fullmatch(said):
                return _choice_in(said)
    return _choice_in(plain.rpartition("\n")[2])


def _choice_in(said: str) -> str | None:
    """The chosen letter: the one that the text begins with, or the only one in it."""
    said = BEFORE_CHOICE.sub("", said, count=1)
    if lone := LONE.fullmatch(said):
        return lone[1].upper()
    letter = LETTER.search(said)
    if letter is None:
        return None
    before, after = said[: letter.start()], said[letter.end() :]
    another = ANOTHER.match(after)
    (clause, *_) = END_OF_CLAUSE.split(after, maxsplit=1)
    hedged = (another and another[1] != letter[1]) or (before and set(LETTER.findall(after)) - {letter[1]})
    return None if hedged or NEGATION.search(before) or NEGATION.search(clause) else letter[1]


REWARDS: Rewards = {
    "exact_match": BuiltinReward(exact_match, (0.0, 1.0), looks_at_text_only=True),
    "normalized_match": BuiltinReward(normalized_match, (0.0, 1.0), looks_at_text_only=True),
    "multiple_choice": BuiltinReward(
        multiple_choice, (0.0, 1.0), looks_at_text_only=True, looks_for=lambda _: "<answer> </answer>"
    ),
    "numeric_match": BuiltinReward(numeric_match, (0.0, 1.0), looks_at_text_only=True),
    "count_match": BuiltinReward(
        count_match, (0.0, 1.0), looks_at_text_only=True, looks_for=lambda _: "<answer> </answer>"
    ),
}
