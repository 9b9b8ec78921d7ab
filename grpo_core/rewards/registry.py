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

# Rewards that stand on libraries of an extra of this package: the extra, and the modules that they import.
EXTRAS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "math_answer": ("rewards", ("math_verify", "sympy")),
    "json_schema": ("rewards", ("jsonschema", "referencing")),
    "language": ("rewards", ("py3langid",)),
    "rouge": ("rewards", ("rouge_score",)),
    "judge": ("judge", ("certifi", "openai")),
}

# Columns whose values a reward cannot take all of: what is wrong with one of them, "" if nothing is.
VALUE_PROBLEMS: Mapping[Any, Mapping[str, Callable[[str], str]]] = {
    structured.json_schema: {"schema": structured.schema_problem},
}
