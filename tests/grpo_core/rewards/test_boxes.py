"""The reward for boxes, against cells counted on a grid and all matchings tried; and what tries to fool it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_core.rewards.builtin.boxes import box_iou

Box = tuple[int, int, int, int]

SIDE = 9  # of the pictures that the boxes lie in


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    (left, right), (top, bottom) = (
        sorted(draw(st.lists(st.integers(0, SIDE), min_size=2, max_size=2, unique=True))) for _ in "xy"
    )
    return left, top, right, bottom


SEVERAL = st.lists(boxes(), min_size=1, max_size=4)


def _value(named: Sequence[Any], wanted: Sequence[Any]) -> float:
    [value] = box_iou([json.dumps([*named])], [[list(box) for box in wanted]])
    assert value is not None
    return value


def _cells(box: Box) -> set[tuple[int, int]]:
    left, top, right, bottom = box
    return {*itertools.product(range(left, right), range(top, bottom))}


def _by_counting(named: Sequence[Box], wanted: Sequence[Box]) -> float:
    few, many = sorted(([_cells(box) for box in part] for part in (named, wanted)), key=len)
    matchings = itertools.permutations(many, len(few))
    shares = (sum(len(a & b) / len(a | b) for a, b in zip(few, chosen, strict=True)) for chosen in matchings)
    return max(shares) / len(many)


@given(named=SEVERAL, wanted=SEVERAL)
@settings(deadline=None)
def test_box_iou_is_that_of_cells_counted_in_the_best_of_all_matchings(named: list[Box], wanted: list[Box]) -> None:
    value = _value(named, wanted)
    assert value == pytest.approx(_by_counting(named, wanted), abs=1e-12)
    assert 0 <= value <= 1


@given(named=SEVERAL, wanted=SEVERAL)
@settings(deadline=None)
def test_box_iou_is_symmetric_and_1_for_the_same_boxes_alone(named: list[Box], wanted: list[Box]) -> None:
    assert _value(named, wanted) == pytest.approx(_value(wanted, named), abs=1e-12)
    assert (_value(named, wanted) == 1) == (sorted(named) == sorted(wanted))


@given(
    named=SEVERAL,
    wanted=SEVERAL,
    scale=st.sampled_from([0.125, 0.5, 3, 1000]),
    shift=st.tuples(st.integers(-5000, 5000), st.integers(-5000, 5000)),
)
@settings(deadline=None)
def test_box_iou_does_not_depend_on_the_unit_or_the_origin(
    named: list[Box], wanted: list[Box], scale: float, shift: tuple[int, int]
) -> None:
    def moved(part: list[Box]) -> list[list[float]]:
        return [[value * scale + by for value, by in zip(box, shift * 2, strict=True)] for box in part]

    assert _value(moved(named), moved(wanted)) == pytest.approx(_value(named, wanted), abs=1e-9)


@pytest.mark.parametrize(
    "completion",
    [
        "[1, 2, 3, 5]",
        "[1,2,3,5]",
        "[1.0, 2., +3, 5e0]",
        "The dog is at [ 1 , 2 ,\n3, 5 ].",
        "(1, 2, 3, 5)",
        '{"bbox_2d": [1, 2, 3, 5]}',
        '```json\n[\n\t{"bbox_2d": [1, 2, 3, 5], "label": "dog"}\n]\n```',
        "<ref>dog</ref><box>[[1, 2, 3, 5]]</box>",
        "<box>(1,2),(3,5)</box>",
        "dog(1,2),(3,5)",  # Qwen2-VL's, without its special tokens
        "<think>[0, 0, 9, 9]? No.</think> [1, 2, 3, 5]",
        "<think>[0, 0, 9, 9]? No.</think> <answer>[1, 2, 3, 5]</answer>",
        "<answer>[0, 0, 9, 9]</answer><answer>[1, 2, 3, 5]</answer>, not [0, 0, 9, 9]",
        "[[1, 2, 3, 5]] and point_2d [2, 3], [1, 2, 3, 4, 5]",
    ],
)
def test_box_iou_reads_the_forms_that_models_write(completion: str) -> None:
    assert box_iou([completion], [[1, 2, 3, 5]]) == [1]
    assert box_iou([[{"role": "assistant", "content": completion}]], ["[1, 2, 3, 5]"]) == [1]


@pytest.mark.parametrize(
    "answer",
    ["[1, 2, 3, 5]", "(1,2),(3,5)", [1, 2, 3, 5], [1.0, 2.0, 3.0, 5.0], [[1, 2, 3, 5]], [{"bbox_2d": [1, 2, 3, 5]}]],
)
def test_the_answer_may_be_text_a_box_or_a_list_of_boxes(answer: Any) -> None:
    assert box_iou(["[1, 2, 3, 5]", "[1, 2, 3, 8]", ""], [answer] * 3) == [1, 0.5, 0]


@pytest.mark.parametrize(
    "answer", [None, "", "a dog", [], [1, 2, 3], [3, 2, 1, 5], [1, 2, 1, 5], "[nan, 0, 1, 1]", [[1, 2, 3, 5], [0] * 4]]
)
def test_box_iou_does_not_apply_to_an_answer_without_a_box_or_with_one_that_encloses_nothing(answer: Any) -> None:
    assert box_iou(["[1, 2, 3, 5]"], [answer]) == [None]


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "a dog",
        "1, 2, 3, 5",
        "[1, 2], [3, 5]",
        "[3, 5, 1, 2]",  # corners swapped: both differences are negative, their product is not
        "[3, 2, 1, 5]",
        "[1, 2, 1, 5]",
        "[2, 3, 2, 3]",
        "[5, 7, 9, 9]",
        "[NaN, 2, 3, 5]",
        "[-Infinity, -Infinity, Infinity, Infinity]",
        "[-1e999, -1e999, 1e999, 1e999]",
        "[-1e308, -1e308, 1e308, 1e308]",
        "[1, 2, 3, 1e999]",
        "[1e-999, 1e-999, 1e-999, 1e-999]",
        "<answer>none</answer> [1, 2, 3, 5]",
        "[1, 2, 3, 5]</think>",
        "[" * 20_000,
        "[1," * 20_000,
        "(" + "1" * 20_000 + ",",
    ],
)
def test_what_names_no_box_that_meets_the_answers_gets_nothing(completion: str) -> None:
    assert box_iou([completion], [[1, 2, 3, 5]]) == [0]


def test_naming_many_boxes_costs_the_share_of_each_that_is_too_many() -> None:
    right, wrong = "[1, 2, 3, 5]", "[6, 6, 9, 9]"
    swapped = "[9, 9, 6, 6]"
    completions = [right + right, right + wrong * 3, right + swapped, right * 1000]
    assert box_iou(completions, [[1, 2, 3, 5]] * 4) == [1 / 2, 1 / 4, 1 / 2, 1 / 1000]


def test_a_box_around_the_whole_picture_gets_the_answers_share_of_it() -> None:
    assert box_iou(["[0, 0, 10, 10]"], [[1, 2, 3, 5]]) == [6 / 100]
