"""The rewards that come with grpo_core.

Their modules import what is heavy inside the functions: a configuration that names one reward pays for that one.
"""

from __future__ import annotations

from grpo_core.rewards import answers, code, form, maths, quality, structured
from grpo_core.rewards.basics import Rewards

BUILTIN: Rewards = {
    **answers.REWARDS,
    **maths.REWARDS,
    **structured.REWARDS,
    **code.REWARDS,
    **form.REWARDS,
    **quality.REWARDS,
}
