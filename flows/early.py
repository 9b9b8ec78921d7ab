"""What validate or plan would refuse after minutes, refused before any server is started and any stage begins."""

from __future__ import annotations

from pathlib import Path

from grpo_core.config import RunConfig
from grpo_core.plan import make_plan, plan_inputs
from grpo_core.rewards.contract import resolve
from tasks.sources import READERS, count_prompts

ENOUGH = 10**9  # prompts, where counting them would mean to load a dataset: no rule asks for more


def refuse_early(config: RunConfig) -> None:
    """Raises RewardError for a reward that cannot be had, SourceError for a training file that cannot, PlanError for
    sizes that do not go together, whichever prompts validate keeps of the file."""
    for reward in config.rewards:
        resolve(reward)
    data = config.data
    is_file = Path(data.train).suffix in READERS and not Path(data.train).is_dir()
    make_plan(plan_inputs(config, count_prompts("data.train", data.train, data.train_split) if is_file else ENOUGH))
