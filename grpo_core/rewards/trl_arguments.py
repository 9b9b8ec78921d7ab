"""What TRL passes to reward functions beside completions and columns: `trainer_state`, `log_extra` and `log_metric`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grpo_core.errors import RewardError

if TYPE_CHECKING:  # what the process of an isolated reward would import
    from grpo_core.planning.plan import Plan

NAME = re.compile(r"\w[\w. -]*(/\w[\w. -]*)*")  # MLflow takes no other characters, and no empty part of a path
LONGEST_NAME = 100  # characters


@dataclass(frozen=True)
class TrainerState:
    """Place in the training when completions are scored; names are those of `transformers.TrainerState`.

    `global_step`: updates done; `max_steps`: updates of the plan; `epoch`: passes over the prompts done.
    """

    global_step: int
    max_steps: int
    epoch: float

    @classmethod
    def after(cls, updates: int, plan: Plan) -> TrainerState:
        return cls(updates, plan.max_steps, plan.epoch(updates))


UNKNOWN_PLAN = TrainerState(0, 1, 0.0)  # before the first update, as in a rehearsal


@dataclass(frozen=True)
class Logged:
    """What the rewards have logged about one completion, by REWARD/NAME. `columns`: texts of `log_extra`; `figures`: of
    `log_metric`, the mean over the call that scored the completion."""

    columns: dict[str, str | None] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)


class CallLog:
    """What one call of a reward function logs."""

    def __init__(self) -> None:
        self.columns: dict[str, list[str | None]] = {}
        self.figures: dict[str, list[float]] = {}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Append values, one per completion of the call, to a column of the records, as text."""
        _check_name("log_extra", column)
        self.columns.setdefault(column, []).extend(None if value is None else str(value) for value in values)

    def log_metric(self, name: str, value: float) -> None:
        """Add a figure to the metrics. Figures that are not finite are left out."""
        _check_name("log_metric", name)
        try:
            self.figures.setdefault(name, []).append(float(value))
        except (TypeError, ValueError):
            raise RewardError(f"log_metric({name!r}, {value!r}): the value is not a number") from None

    def add_to(self, logged: Sequence[Logged], reward: str) -> None:
        """Add this log to what is known of the call's completions. Raises RewardError if a column has not one value for
        each."""
        for column, values in self.columns.items():
            if len(values) != len(logged):
                raise RewardError(
                    f"reward {reward!r}: log_extra({column!r}) got {len(values)} values for {len(logged)} completions; "
                    "one each is needed"
                )
            for completion, value in zip(logged, values, strict=True):
                completion.columns[f"{reward}/{column}"] = value
        for name, given in self.figures.items():
            if finite := [value for value in given if math.isfinite(value)]:
                for completion in logged:
                    completion.figures[f"{reward}/{name}"] = sum(finite) / len(finite)


def _check_name(function: str, name: Any) -> None:
    if not (isinstance(name, str) and len(name) <= LONGEST_NAME and NAME.fullmatch(name)):
        raise RewardError(
            f"{function}({name!r}, …): a name has letters, digits, '_', '.', '-', spaces and, between parts, '/', and "
            f"at most {LONGEST_NAME} characters"
        )
