"""The rewards that come with grpo_core.

Their modules import what is heavy inside the functions: a configuration that names one reward pays for that one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from grpo_core.rewards.builtin import answers, classifier, code, form, judge, maths, quality, structured
from grpo_core.rewards.types import Rewards

BUILTIN: Rewards = {
    **answers.REWARDS,
    **maths.REWARDS,
    **structured.REWARDS,
    **code.REWARDS,
    **form.REWARDS,
    **quality.REWARDS,
    **classifier.REWARDS,
    **judge.REWARDS,
}

# Arguments that no reward follows from: they may change without a training's results being another's.
OPERATIONAL: Mapping[str, frozenset[str]] = {
    "classifier": classifier.OPERATIONAL,
    "judge": judge.OPERATIONAL,
}

# Columns whose values a reward cannot take all of: what is wrong with one of them, "" if nothing is.
VALUE_PROBLEMS: Mapping[Any, Mapping[str, Callable[[str], str]]] = {
    structured.json_schema: {"schema": structured.schema_problem},
}
