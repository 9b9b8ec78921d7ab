"""The reward for grounding: boxes in an image, given by two corners."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from grpo_core.data.chat import text_of
from grpo_core.rewards.builtin.answers import TAGGED
from grpo_core.rewards.builtin.record import BuiltinReward, Rewards

NUMBER = r"\s*([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)\s*"
BOX = re.compile(
    rf"[\[(]{NUMBER},{NUMBER},{NUMBER},{NUMBER}[\])]"  # [x1, y1, x2, y2], also within JSON
    rf"|\({NUMBER},{NUMBER}\)\s*,\s*\({NUMBER},{NUMBER}\)"  # (x1,y1),(x2,y2), also between tags
)

Box = tuple[float, ...]  # x1, y1, x2, y2


def box_iou(completions: Sequence[Any], answer: Sequence[str | list[Any]]) -> list[float | None]:
    """Intersection over union of the box that the completion names and the answer's, from 0 to 1.

    Boxes are written `[x1, y1, x2, y2]`, alone or in JSON (`{"bbox_2d": [...]}`), or `(x1,y1),(x2,y2)`, alone or in
    tags (`<box>`). Those of the last `<answer>` count, if there is one, else those behind the last `</think>`, else
    all. An answer is such a text, or a list of four numbers, or of such lists; coordinates are compared as they stand.
    None if the answer has no box, or one that encloses nothing.

    Several boxes: the sum over the best one-to-one matching, divided by the larger of the two numbers of boxes, as in
    VisionReasoner (arXiv:2505.12081), but of the IoU itself, not of whether it exceeds 0.5. So each box too many or too
    few costs its share, as does one with swapped corners or without an area.
    """
    return [
        None if not (wanted := _boxes(str(expected))) or not all(map(_area, wanted)) else _overlap(_named(said), wanted)
        for said, expected in zip(map(text_of, completions), answer, strict=True)
    ]


def _named(text: str) -> list[Box]:
    tagged = TAGGED.findall(text)
    return _boxes(tagged[-1] if tagged else text.rpartition("</think>")[2])


def _boxes(text: str) -> list[Box]:
    return [tuple(float(it) for it in match.groups() if it is not None) for match in BOX.finditer(text)]


def _overlap(named: Sequence[Box], wanted: Sequence[Box]) -> float:
    from scipy.optimize import linear_sum_assignment

    if not named:
        return 0.0
    ious = [[_iou(one, other) for other in wanted] for one in named]
    matched = zip(*linear_sum_assignment(ious, maximize=True), strict=True)
    return sum(ious[row][column] for row, column in matched) / max(len(named), len(wanted))


def _iou(one: Box, other: Box) -> float:
    (left, top), (right, bottom) = map(max, one[:2], other[:2]), map(min, one[2:], other[2:])
    shared = _area((left, top, right, bottom))
    union = _area(one) + _area(other) - shared
    return shared / union if 0 < union < math.inf else 0.0


def _area(box: Box) -> float:
    """0 if the corners are swapped, or too far away for the number to be finite."""
    left, top, right, bottom = box
    area = max(right - left, 0.0) * max(bottom - top, 0.0)
    return area if area < math.inf else 0.0


REWARDS: Rewards = {
    "box_iou": BuiltinReward(
        box_iou, (0.0, 1.0), looks_at_text_only=True, looks_for=lambda _: "</think> <answer> </answer>"
    )
}
