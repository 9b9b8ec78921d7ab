"""What register writes for people: the result of a run in one line."""

from __future__ import annotations

from typing import Any

from tasks.register import result_line


def _report(metric: str, mean: float, gain: float) -> dict[str, Any]:
    def found(value: float) -> dict[str, float]:
        return {"mean": value, "low": value - 0.04, "high": value + 0.04}

    return {
        "sets": {
            "held-out": {"policies": {"trained": {metric: found(mean)}}, "differences": {"base": {metric: found(gain)}}}
        }
    }


def test_a_runs_result_is_its_figure_and_its_gain_with_their_intervals() -> None:
    line = result_line(_report("accuracy", 0.796, 0.36), "accuracy")
    assert line == "accuracy 79.6% [75.6, 83.6], +36.0 points [32.0, 40.0]"
    line = result_line(_report("reward", 1.5, -0.25), "reward")
    assert line == "reward 1.500 [1.460, 1.540], -0.250 [-0.290, -0.210]"
