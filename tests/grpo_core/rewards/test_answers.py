"""Rewards that compare text and numbers with the answer: right ones in hard forms, and attempts without one."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_core.rewards.builtin.answers import (
    count_match,
    exact_match,
    multiple_choice,
    normalized_match,
    numeric_match,
)


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("46", "46", 1),
        ("The sum is 46.", "46", 1),
        ("first 45, then 46", 46, 1),
        ("46 or 47", "46", 0),
        ("1,234,567", "1234567", 1),
        ("-3", "-3", 1),
        ("3", "-3", 0),
        ("46.0", "46", 1),
        (".5", "0.50", 1),
        ("1e3", "1000", 1),
        (".5e1 is 5", "5", 1),
        (".5e1", "5", 1),
        ("-0.0", "0", 1),
        ("12,34", "34", 1),
        ("0.1", "0.10000000000000001", 0),
        ("9" * 400, "46", 0),
        ("1e9999999", "46", 0),
        ("1e99999999999999999999", "46", 0),
        ("-1e-9999999", "46", 0),
        ("46", "1e9999999", 0),
        ("46", "1,000", 0),
        ("1000", "1,000", 1),
        ("146", "46", 0),
        ("", "46", 0),
        ("none", "46", 0),
        ("10-46", "46", 1),
        ("10-46", "-46", 0),
        ("(3)-46", "46", 1),
        ("x-46", "46", 1),
        ("x = -46", "-46", 1),
        ("x = \u221246", "-46", 1),  # a minus as it is printed
        ("\u221246", "46", 0),
        ("(-3)", "-3", 1),
        ("5--3", "-3", 1),
        ("-.5", "-0.5", 1),
        ("+7", "7", 1),
        ("46", None, None),
        ("46", "not a number", None),
        ("46", "nan", None),
    ],
)
def test_numeric_match_compares_the_last_number(completion: str, answer: Any, reward: float | None) -> None:
    assert numeric_match([completion], [answer]) == [reward]


def test_numeric_match_allows_the_given_tolerance() -> None:
    assert numeric_match(["3.14", "3.2"], ["3.1415", "3.1415"], tolerance=0.01) == [1, 0]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("3", "3", 1),
        ("There are 3 circles.", 3, 1),
        ("There are three circles.", 3, 1),
        ("Three", "three", 1),
        ("Twenty-One!", 21, 1),
        ("twenty one", "21", 1),
        ("Thirteen", 13, 1),
        ("ninety-nine", 99, 1),
        ("2 red and 1 blue, so 3", 3, 1),
        ("two red and one blue, so 3", 3, 1),
        ("There are three circles, one of them red.", 3, 1),
        ("The red one is above 3 others.", 3, 1),
        ("There is one circle.", 1, 1),
        ("There are no circles.", 0, 1),
        ("None.", 0, 1),
        ("zero", 0, 1),
        ("No, there are 4.", 4, 1),
        (r"\boxed{3} of the 5 shapes", 3, 1),
        ("<think>5?</think><answer>3 circles</answer> of 5", 3, 1),
        ("**3**", 3, 1),
        ("3.0", 3, 1),
        ("1,234 dots", 1234, 1),
        ("3\u4e2a\u5706", 3, 1),  # three circles, in Chinese
        ("1, 2, 3, 4", 4, 1),
        ("3 or 4", 3, 0),
        ("3-4", 3, 0),
        ("2.5", 5, 0),
        ("-3", 3, 0),
        ("33rd", 3, 0),
        ("A 3D picture, x3", 3, 0),
        ("someone", 1, 0),
        ("one hundred", 1, 0),
        ("two dozen", 2, 0),
        ("tens of thousands", 10, 0),
        ("", 0, 0),
        ("nothing", 0, 0),
        ("<answer></answer> 3", 3, 0),
        ("1e9999999", 3, 0),
        ("1e99999999999999999999", 3, 0),
        ("9" * 5000, 3, 0),
        ("3", 3.0, 1),
        ("3", None, None),
        ("3", "", None),
        ("3", "2.5", None),
        ("3", "-3", None),
        ("3", "nan", None),
        ("3", "3 or 4", None),
        ("no", "no", None),
        ("a dozen", "dozen", None),
    ],
)
def test_count_match_compares_the_count_in_digits_or_words(completion: str, answer: Any, reward: float | None) -> None:
    assert count_match([completion], [answer]) == [reward]


def test_exact_match_ignores_white_space_around_only() -> None:
    assert exact_match([" yes\n", "y es", "Yes", "yes"], ["yes", "yes", "yes", None]) == [1, 0, 0, None]


@pytest.mark.parametrize("reward", [exact_match, normalized_match, numeric_match])
def test_a_whole_number_of_a_column_with_gaps_is_read_without_its_point(reward: Any) -> None:
    """As pandas writes integers where one is missing."""
    assert reward(["8", "-3", "8.5", "0", "8"], [8.0, -3.0, 8.5, 0.0, None]) == [1, 1, 1, 1, None]


def test_conversations_are_scored_by_their_last_message() -> None:
    assert numeric_match([[{"role": "assistant", "content": "46"}]], ["46"]) == [1]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("The Eiffel Tower!", "Eiffel tower"),
        ("St. John’s", "st johns"),
        ("**Paris**", "Paris"),
        ("“Paris”.", "paris"),
        (" New\u00a0 York\n", "new york"),
        ("Ｐａｒｉｓ", "Paris"),
        ("cafe\u0301", "café"),
        ("pa\u00adr\u200bis", "Paris"),
        ("Straße", "STRASSE"),
        ("1,234,567.5", "1234567.5"),
        ("−5", -5),
        ("A", "a"),
    ],
)
def test_normalized_match_sees_through_case_articles_punctuation_and_white_space(completion: str, answer: Any) -> None:
    assert normalized_match([completion], [answer]) == [1]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("Paris or London", "Paris"),
        ("Paris Paris", "Paris"),
        ("5", "-5"),
        ("35", "3.5"),
        ("5", ".5"),
        ("12", "1/2"),
        ("1030", "10:30"),
        ("105", "10-5"),
        ("102", "10²"),
        ("11/2", "1½"),
        ("12", "1,2"),
        ("50", "50%"),
        ("C", "C++"),
        ("C", "C#"),
        ("Рaris", "Paris"),  # the first letter is Cyrillic
        ("", "The"),
        ("an", "The"),
        ("...", "?!"),
        ("", "A"),
    ],
)
def test_normalized_match_does_not_take_another_answer_for_the_right_one(completion: str, answer: str) -> None:
    assert normalized_match([completion], [answer]) == [0]


def test_normalized_match_does_not_apply_where_there_is_no_answer() -> None:
    assert normalized_match(["", "x"], ["", None]) == [None, None]  # type: ignore[list-item]


@pytest.mark.parametrize(
    "completion",
    [
        "B",
        "b",
        " (B)\n",
        "B.",
        "**B**",
        "B) Paris",
        "B: Paris, a city",
        "The answer is B.",
        "the answer is (B)",
        "**Answer:** B",
        "answer: b",
        r"\boxed{B}",
        r"Final Answer: The final answer is $\boxed{\text{(B)}}$. I hope it is correct.",
        "<think>A or C?</think><answer>B</answer>",
        "<answer>\nB) Paris\n</answer>",
        "Let me think.\nA is too big.\n\nTherefore, B",
        "B is the answer.",
        "Option B is correct.",
        "The correct answer is option B because option A is wrong.",
        "The answer is B, since A is wrong.",
        "The answer is A. Wait, no: the answer is B.",
        "Answer: B) Vitamin C",
        "The best choice would be B.",
        "I would go with (B): it is not toxic",
        "答案是B。",
        "选项A错，因此选择B。",
        "答案：B，不是C",
        "答えはBです。",
    ],
)
def test_multiple_choice_finds_the_letter_in_hard_phrasings(completion: str) -> None:
    assert multiple_choice([completion] * 2, ["B", "(b)"]) == [1, 1]


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "A or B",
        "The answer is A or B.",
        "Answer: either A or B",
        "答案是A或B。",
        "答案不是B。",
        "答案是B吗？",
        "答案是B。不对，重新看。",
        "答えはBではなく、別です。",
        "Answer: A, B, C, D",
        "Answer: A/B",
        "Answer: A (or B)",
        "Answer: A? B? C? D?",
        "A B C D",
        "(A) (B) (C) (D)",
        "ABCD",
        r"\boxed{A, B}",
        r"\boxed{AB}",
        "<answer>A and B</answer>",
        "The answer is not A, and not B.",
        "It isn't B",
        "A is not correct, B is not correct",
        "The answer is A dog.",
        "The answer is B cells",
        "A dog barks.",
        "I think so",
        "Neither A",
        "Answer: В Answer: А",  # Cyrillic
        "Answer: K",
    ],
)
def test_multiple_choice_takes_no_hedge_negation_or_word_for_a_choice(completion: str) -> None:
    letters = list("ABCDIK")
    assert multiple_choice([completion] * len(letters), letters) == [0, 0, 0, 0, 0, None]


def test_multiple_choice_grants_one_choice_to_a_completion_that_states_all() -> None:
    for completion in (r"\boxed{A} \boxed{B} \boxed{C}", "Answer: A\nAnswer: B\nAnswer: C", "<answer>A</answer>" * 3):
        assert sum(multiple_choice([completion] * 3, ["A", "B", "C"])) == 1  # type: ignore[arg-type]
