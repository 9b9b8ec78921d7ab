"""The record of a built-in reward: everything that other code has to know about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

RewardFunction = Callable[..., Any]  # returns the rewards, or a coroutine that does
Range = tuple[float, float]


def written(answer: Any) -> str:
    """A right answer as people write it: a whole number without ".0", which a column of numbers with gaps gives it."""
    return str(int(answer) if isinstance(answer, float) and answer.is_integer() else answer)


def _nothing(args: Mapping[str, Any]) -> str:
    return ""


@dataclass(frozen=True)
class BuiltinReward:
    """A reward that comes with the package. Code that treats rewards differently asks their records."""

    function: RewardFunction
    range: Range
    """Lowest and highest value that it gives."""
    version: int = 1
    """Version of its values. Raise it when it gives another value for some completion: runs that used it are then
    trained again."""
    looks_at_text_only: bool = False
    """It opens no file, reaches no server and runs no program, whatever its arguments: anyone who can start a run in
    Prefect's UI may name it with any arguments."""
    operational: frozenset[str] = frozenset()
    """Arguments that change no value: if they change, results and checkpoints stay valid."""
    value_problems: Mapping[str, Callable[[str], str]] = field(default_factory=dict)
    """Columns of which it cannot take every value, each with a function that returns the problem of a value, or ""."""
    args_problem: Callable[[Mapping[str, Any]], str] = _nothing
    """Returns the problem of args that a configuration can hold but the function cannot take, or ""."""
    looks_for: Callable[[Mapping[str, Any]], str] = _nothing
    """Returns the tags or other fixed texts that it looks for in a completion, given its args."""
    asks_a_model: bool = False
    """True if a first call may take minutes: it is rehearsed with its whole timeout."""
    model_argument: str | None = None
    """Argument that names a model folder; the values follow from the folder's content, not from its name."""
    extra: str = ""
    """Extra of this package, as in pip install -e '.[EXTRA]', that brings the libraries it needs."""
    modules: tuple[str, ...] = ()
    """Modules of those libraries that it imports."""
    if_weight_is_negative: str = ""
    """Warning to give if its weight is below 0."""


Rewards = Mapping[str, BuiltinReward]  # by the name that a configuration uses
