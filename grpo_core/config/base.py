"""The base of all sections of a configuration."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

MAX_COUNT = 2**31 - 1  # largest number of anything that is counted
LONGEST_SECONDS = 604_800.0  # a week; the kernel's timers and waits take less than four
MOST_GIB = 1_048_576.0
HIGHEST_ENTROPY = 100.0  # nats: more than ln of any vocabulary


class Section(BaseModel):
    """A section of the configuration. Numbers have to be numbers: text such as "1e9", and true, are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, strict=True, use_attribute_docstrings=True
    )

    @field_validator("*")
    @classmethod
    def _is_countable(cls, value: Any) -> Any:
        if type(value) is int and value > MAX_COUNT:
            raise ValueError(f"{value} is beyond {MAX_COUNT:,}, the largest number of anything that is counted")
        return value


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested values by their full keys, such as train.learning_rate or rewards.0.weight."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    flat: dict[str, Any] = {}
    for key, value in items:
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, (dict, list)) else {name: value}
    return flat
