"""What every section of a configuration has in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

MOST = 2**31 - 1  # of anything that is counted
HIGHEST_ENTROPY = 100.0  # nats: more than ln of any vocabulary


class Section(BaseModel):
    """Numbers are numbers: neither text such as "1e9" nor true is taken for one."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, strict=True, use_attribute_docstrings=True
    )

    @field_validator("*")
    @classmethod
    def _is_countable(cls, value: Any) -> Any:
        if type(value) is int and value > MOST:
            raise ValueError(f"{value} is beyond {MOST:,}, the most of anything that is counted")
        return value


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Nested values by their keys, such as train.learning_rate or rewards.0.weight."""
    items = values.items() if isinstance(values, dict) else enumerate(values)
    flat: dict[str, Any] = {}
    for key, value in items:
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, (dict, list)) else {name: value}
    return flat
