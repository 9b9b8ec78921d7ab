"""The rewards that come with grpo_core, by name. Each record stands beside its function, in a module of `builtin`.

Those modules import what is heavy inside the functions: a configuration pays only for the rewards that it names.
"""

from __future__ import annotations

from grpo_core.rewards.builtin import answers, classifier, code, form, judge, maths, quality, structured
from grpo_core.rewards.types import BuiltinReward

BUILTIN: dict[str, BuiltinReward] = {
    **answers.REWARDS,
    **maths.REWARDS,
    **structured.REWARDS,
    **code.REWARDS,
    **form.REWARDS,
    **quality.REWARDS,
    **classifier.REWARDS,
    **judge.REWARDS,
}
