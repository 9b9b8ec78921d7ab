"""Rewards for form and quality: golden values from their papers or by hand, and attempts to get them for nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_core.rewards.builtin.answers import count_match, multiple_choice, normalized_match
from grpo_core.rewards.builtin.boxes import box_iou
from grpo_core.rewards.builtin.form import format_regex, tags
from grpo_core.rewards.builtin.language import language
from grpo_core.rewards.builtin.length import char_length, length, length_band, soft_overlong_punishment
from grpo_core.rewards.builtin.readability import SENTENCE, automated_readability_index, readability
from grpo_core.rewards.builtin.rouge import rouge
from grpo_core.rewards.builtin.structured import json_schema
from grpo_core.rewards.builtin.variety import distinct_n, repetition, self_repetition
from grpo_core.rewards.registry import BUILTIN

ARTICLE_1 = {  # of the Universal Declaration of Human Rights
    "en": "All human beings are born free and equal in dignity and rights. They are endowed with reason and conscience "
    "and should act towards one another in a spirit of brotherhood.",
    "de": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen begabt "
    "und sollen einander im Geiste der Brüderlichkeit begegnen.",
    "fr": "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison et de "
    "conscience et doivent agir les uns envers les autres dans un esprit de fraternité.",
    "zh": "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。",
}


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a\nb</think>\n<answer>1</answer>", 1),
        ("First. <think>a</think> Then. <answer>1</answer> Done.", 1),
        ("<think>a</think> 1", 0.5),
        ("a <answer>1</answer>", 0.5),
        ("<think>a</think><answer>1", 0.5),
        ("<answer>1</answer><think>a</think>", 0.5),
        ("<think>a<answer>1</answer></think>", 0.5),
        ("<think>a<answer>1</think></answer>", 0.5),
        ("<think></think><answer> \n</answer>", 0),
        ("<think>a</think>" * 2 + "<answer>1</answer>" * 2, 0),
        ("<think><think>a</think></think><answer>1</answer>", 0.5),
        ("</think>a<think></answer>1<answer>", 0),
        ("<THINK>a</THINK>< answer >1</answer>", 0),
        ("<think><answer></think></answer>", 0.5),
        ("", 0),
    ],
)
def test_a_tag_counts_once_in_order_and_with_content(completion: str, reward: float) -> None:
    assert tags([completion]) == [reward]


def test_more_tags_give_finer_credit_and_bad_lists_are_refused() -> None:
    assert tags(["<a>1</a><c>3</c>"], tags=["a", "b", "c"]) == [pytest.approx(2 / 3)]
    for bad in ([], "think", ["a", "a"]):
        with pytest.raises(ValueError, match="must be a list of different names"):
            tags(["x"], tags=bad)


def test_length_band_is_flat_inside_and_falls_to_zero_on_both_sides() -> None:
    ids = [[0] * n for n in (0, 5, 10, 15, 20, 30, 40, 400)]
    assert length_band(ids, low=10, high=20) == [0, 0.5, 1, 1, 1, 0.5, 0, 0]
    assert length_band([[]], low=0, high=5) == [1]
    for low, high in ((5, 4), (-1, 4), (0, 0)):
        with pytest.raises(ValueError, match="the band must not be empty"):
            length_band(ids, low=low, high=high)


def test_char_length_is_the_first_reward_of_trls_documentation() -> None:
    assert char_length(["", "a" * 20, "é" * 25], target=20) == [-20, 0, -5]


@pytest.mark.slow
@pytest.mark.parametrize("code", ARTICLE_1)
def test_language_tells_languages_apart(code: str) -> None:
    values = language(list(ARTICLE_1.values()), code)
    assert [value > 0.9 for value in values] == [other == code for other in ARTICLE_1]  # type: ignore[operator]


@pytest.mark.slow
def test_language_is_not_fooled_by_a_beginning_in_it_or_by_no_language_at_all() -> None:
    (mixed,) = language([f"{ARTICLE_1['en']} {ARTICLE_1['de']}"], "en")
    assert mixed is not None and 0.3 < mixed < 0.7
    nothing = language(["", "12 34 56.", "!!!", "42 " * 200, "\u200b" * 50], "en")
    assert nothing == [0] * len(nothing)
    with pytest.raises(ValueError, match=r"language='english' is unknown to py3langid; it knows .*en"):
        language(["x"], "english")


@pytest.mark.parametrize(
    ("completion", "n", "reward"),
    [
        ("", 2, 0),
        ("one two three", 4, 0),
        ("the cat sat on the mat", 2, 0),
        ("a b a b a b", 2, 2 / 5 - 1),  # 5 bigrams, 2 different ones
        ("one two three four " * 10, 4, 4 / 37 - 1),
        ("The cat, THE CAT. the cat! The cat?", 2, 2 / 7 - 1),
        ("春眠不觉晓，" * 4, 3, 6 / 22 - 1),
    ],
)
def test_repetition_is_the_share_of_ngrams_that_came_before(completion: str, n: int, reward: float) -> None:
    assert repetition([completion], n) == [pytest.approx(reward)]


@pytest.mark.parametrize("piece", ["ha", "abc", "!", "😀", "- ", "_", "好", "ไม่", "\u0301", "yes, ", "Ha ha! "])
def test_no_way_to_repeat_oneself_is_free(piece: str) -> None:
    (reward,) = repetition([piece * 300], 4)
    assert reward is not None and reward < -0.7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("completion", "kind", "f"),
    [  # Lin 2004, section 3.1: the reference is "police killed the gunman"
        ("police kill the gunman", "rougeL", 3 / 4),
        ("the gunman kill police", "rougeL", 2 / 4),
        ("the gunman police killed", "rougeL", 2 / 4),
        ("police kill the gunman", "rouge2", 1 / 3),
        ("the gunman kill police", "rouge2", 1 / 3),
        ("the gunman police killed", "rouge2", 2 / 3),
        ("the gunman police killed", "rouge1", 1),
        ("Police killed the gunman!", "rougeL", 1),
        ("", "rougeL", 0),
        ("police killed the gunman " * 4, "rougeL", 2 * (1 / 4) / (1 + 1 / 4)),  # said four times: precision 1/4
    ],
)
def test_rouge_gives_the_values_of_its_paper(completion: str, kind: str, f: float) -> None:
    assert rouge([completion], ["police killed the gunman"], kind) == [pytest.approx(f)]


def test_rouge_reads_every_script_and_needs_a_reference() -> None:
    assert rouge(["η γάτα", "η γάτα"], ["η γάτα", "ο σκύλος"]) == [1, 0]
    assert rouge(["x"] * 3, ["", "…", None]) == [None] * 3  # type: ignore[list-item]
    with pytest.raises(ValueError, match="kind='rouge' is none of rouge1"):
        rouge(["x"], ["x"], kind="rouge")


def test_distinct_n_counts_different_ngrams_and_does_not_reward_brevity() -> None:
    assert distinct_n(["a b a b a b"], n=2, minimum=1) == [pytest.approx(2 / 5)]
    assert distinct_n(["", "so it goes", "word " * 500], n=2) == [0, 2 / 20, 1 / 499]
    assert distinct_n([" ".join(map(str, range(100)))], n=2) == [1]
    for arguments in ({"n": 0}, {"minimum": 0}):
        with pytest.raises(ValueError, match="=0 must be at least 1"):
            distinct_n(["x"], **arguments)


def test_self_repetition_compares_with_the_others_of_the_same_prompt() -> None:
    prompts = ["p", "q", "p", "q", "p", "alone"]
    completions = [
        "one two three four",
        "red sky",
        "one two three five",
        "blue sea",
        "six seven eight",
        "one two three",
    ]
    # trigrams 123 234, 123 235 and 678: a half is shared with one of two others, nothing with the third
    assert self_repetition(prompts, completions, n=3) == [-0.25, -1, -0.25, -1, 0, None]
    assert self_repetition(prompts[1::2][:2], ["red sky", "blue sea"], n=2) == [0, 0]


def test_self_repetition_is_not_escaped_by_case_punctuation_or_silence() -> None:
    group = ["Once upon a time.", "ONCE upon, a time!", "once\nupon a time", ""]
    assert self_repetition([[{"role": "user", "content": "p"}]] * 4, group, n=2) == [pytest.approx(-2 / 3)] * 3 + [-1]


def test_readability_is_the_automated_readability_index_in_a_band() -> None:
    # 5 sentences of 5 words of 4 letters, the full stop counting as a character: 4.71·4.2 + 0.5·5 - 21.43 = 0.852
    text = "They were here last week. " * 5
    assert sum(map(len, text.split())) == 5 * 21
    assert readability([text] * 3, low=0, high=1) == [1, 1, 1]
    assert readability([text], low=2.852, high=9) == [pytest.approx(1 - 2 / 5)]
    assert readability([text], low=-9, high=-0.148) == [pytest.approx(1 - 1 / 5)]
    with pytest.raises(ValueError, match="low=9 is above high=5"):
        readability(["x"], low=9, high=5)


# Grades by textstat 0.7.13. Of the first, by hand: 140 characters, 38 words, 4 sentences, so
# 4.71 · 140 / 38 + 0.5 · 38 / 4 - 21.43 = 17.352632 + 4.75 - 21.43 = 0.672632.
GRADED = {
    "A Hare was making fun of the Tortoise one day for being so slow. Do you ever get anywhere? Yes, he said, and I "
    "get there sooner than you think. I'll run you a race and prove it.": 0.6726315789473674,
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or "
    "twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it. And "
    "what is the use of a book, thought Alice, without pictures or conversations?": 12.899473684210527,
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, "
    "and dedicated to the proposition that all men are created equal. Now we are engaged in a great civil war, testing "
    "whether that nation, or any nation so conceived and so dedicated, can long endure. We are met on a great "
    "battle-field of that war.": 10.799635416666668,
}


@pytest.mark.parametrize(("text", "grade"), GRADED.items())
def test_the_automated_readability_index_is_that_of_another_implementation(text: str, grade: float) -> None:
    assert automated_readability_index(SENTENCE.findall(text)) == pytest.approx(grade, abs=1e-12)
    assert readability([text], low=grade, high=grade) == [pytest.approx(1)]
    assert readability([text], low=grade + 1, high=grade + 9) == [pytest.approx(1 - 1 / 5)]


def test_readability_is_not_had_for_nothing() -> None:
    fools = [
        "",
        ". " * 200,
        "Yesterday everyone departed.",
        "word " * 200,
        "extraordinarily " * 30 + ".",
        "a. " * 40,
        "Go now! " * 40,
    ]
    assert readability(fools, low=5, high=9) == [0] * len(fools)


ANY: dict[str, Callable[[list[Any]], list[float | None]]] = {
    "normalized_match": lambda c: normalized_match(c, ["The 3.5"] * len(c)),
    "multiple_choice": lambda c: multiple_choice(c, ["B"] * len(c)),
    "count_match": lambda c: count_match(c, [3] * len(c)),
    "box_iou": lambda c: box_iou(c, [[0, 0, 1, 1]] * len(c)),
    "json_schema": lambda c: json_schema(c, {"type": "string"}),
    "tags": tags,
    "char_length": lambda c: char_length(c, 20),
    "language": lambda c: language(c, "en"),
    "repetition": repetition,
    "rouge": lambda c: rouge(c, ["the cat sat"] * len(c)),
    "distinct_n": distinct_n,
    "self_repetition": lambda c: self_repetition(["p"] * len(c), c),
    "readability": lambda c: readability(c, 5, 9),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ANY)
@settings(max_examples=40, deadline=None)
@given(text=st.text(st.characters(), max_size=300) | st.text("aB_.,<>/{}[]()`\\\n 1-", max_size=300))
@example(text="\ud800")
@example(text="<think>" * 2000)
@example(text="\\boxed{" * 2000)
@example(text="answer is " * 2000)
@example(text="`" * 5000)
@example(text="\\text" * 3000)
def test_whatever_is_written_gets_a_value_in_the_range_as_text_and_as_message(name: str, text: str) -> None:
    low, high = BUILTIN[name].range
    values = ANY[name]([text, "the cat"])
    assert all(value is not None and math.isfinite(value) and low <= value <= high for value in values)
    assert ANY[name]([[{"role": "assistant", "content": written}] for written in (text, "the cat")]) == values


def test_format_regex_wants_the_whole_completion_over_several_lines() -> None:
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    completions = [
        "<think>a\nb</think>\n<answer>1</answer>",
        "x <think></think><answer></answer>",
        "<answer>1</answer>",
    ]
    assert format_regex(completions, pattern) == [1, 0, 0]


def test_length_peaks_at_its_target_and_never_goes_below_zero() -> None:
    assert length([[0] * n for n in (0, 5, 10, 15, 20, 40)], target=10) == [0, 0.5, 1, 0.5, 0, 0]


@pytest.mark.parametrize(("tokens", "reward"), [(0, 0), (15, 0), (16, -0.2), (18, -0.6), (20, -1), (30, -1)])
def test_soft_overlong_punishment_falls_from_its_cache_to_the_limit(tokens: int, reward: float) -> None:
    values = soft_overlong_punishment([[0] * tokens], max_completion_len=20, soft_punish_cache=5)
    assert values == [pytest.approx(reward)]


@pytest.mark.parametrize("cache", [0, 21])
def test_a_cache_outside_the_limit_is_refused(cache: int) -> None:
    with pytest.raises(ValueError, match=f"soft_punish_cache={cache} must be between 1 and max_completion_len=20"):
        soft_overlong_punishment([[0]], max_completion_len=20, soft_punish_cache=cache)
