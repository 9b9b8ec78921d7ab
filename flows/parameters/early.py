"""What validate or plan would refuse after minutes, refused before any server is started and any stage begins."""

from __future__ import annotations

from grpo_core.config.run import RunConfig
from grpo_core.planning.plan import make_plan, plan_inputs
from grpo_core.rewards.contract import resolve
from tasks.data.places import check_places
from tasks.data.sources import count_prompts, needs_loading

ENOUGH = 10**9  # prompts, where counting them would mean to load a dataset: no rule asks for more


def refuse_early(config: RunConfig) -> None:
    """Raises ConfigError for a model or prompts that are not there, RewardError for a reward that cannot be had,
    SourceError for a training file that cannot be read, PlanError for sizes that do not go together, whichever prompts
    validate keeps of the file."""
    check_places(config)
    for reward in config.rewards:
        resolve(reward)
    data = config.data
    num_prompts = ENOUGH if needs_loading(data.train) else count_prompts("data.train", data.train, data.train_split)
    make_plan(plan_inputs(config, num_prompts))
