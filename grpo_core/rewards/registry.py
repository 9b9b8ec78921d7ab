"""The rewards that come with grpo_core, by name. Each record stands beside its function, in a module of `builtin`.

Those modules import what is heavy inside the functions: a configuration pays only for the rewards that it names.
"""

from __future__ import annotations

from grpo_core.rewards.builtin import (
    answers,
    boxes,
    classifier,
    code,
    environment,
    form,
    judge,
    language,
    length,
    readability,
    rouge,
    structured,
    variety,
)
from grpo_core.rewards.builtin.maths import reward as maths
from grpo_core.rewards.builtin.record import BuiltinReward

FAMILIES = (
    *(answers, boxes, maths, structured, code, form, length, language, variety, rouge, readability),
    *(classifier, judge, environment),
)
BUILTIN: dict[str, BuiltinReward] = {name: record for it in FAMILIES for name, record in it.REWARDS.items()}
