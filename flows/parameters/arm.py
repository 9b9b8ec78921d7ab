"""An arm of a sweep: the values in which it differs from the others, and what follows from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_core.config.run import RunConfig
from grpo_core.planning.plan import Plan

Values = Mapping[str, Any]  # by key


@dataclass(frozen=True)
class Arm:
    """A run of a sweep. `values`: by key, those in which the arms differ; `keys`: these and the keys that a sweep sets
    in every arm; `plan`: the run's plan, provided that validate keeps all prompts."""

    values: Values
    keys: Values
    config: RunConfig
    plan: Plan

    @property
    def label(self) -> str:
        return arm_label(self.values)


def arm_label(values: Values) -> str:
    return ", ".join(f"{key}={value_as_text(value)}" for key, value in values.items())


def value_as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
