"""Refuses configurations before a server is started or a stage begins, instead of minutes later in validate or plan."""

from __future__ import annotations

import glob
import os
from dataclasses import replace

from grpo_core.config.run import RunConfig
from grpo_core.data import own_code
from grpo_core.data.recording import check_recording
from grpo_core.environments.registry import sources
from grpo_core.errors import ConfigError
from grpo_core.planning.plan import Plan, make_plan, plan_inputs
from grpo_core.rewards.composition import check_curriculum
from grpo_core.rewards.contract import check_environments, rewards_of
from tasks.data.path_or_hub import check_places
from tasks.data.sources import count_prompts, needs_loading, training_sources
from tasks.processes.launchers.kubernetes_job import check_template
from tasks.processes.training_machine import check_training_machine
from tasks.stages.run_directory import run_folder, storage_root
from tasks.stages.table import GPU_DEPLOYMENT

ASSUMED_PROMPTS = 10**9  # if counting them would mean loading a dataset: no rule asks for more


def refuse_early(config: RunConfig) -> Plan:
    """Return the plan, provided that validate keeps all prompts.

    Raises ConfigError if model, prompts or recording do not exist, if vLLM would not find a model's weights, if
    launch.kubernetes is wrong, if a function that `[data]` names cannot be loaded, or if a curriculum has no pass
    rates; RewardError or EnvironmentsError if a reward, environment or tool cannot be loaded; SourceError if the
    training file cannot be read; PlanError if sizes do not fit together, whichever prompts validate keeps; MachineError
    if this machine should train on a GPU but cannot, or vLLM is not installed.
    """
    if not os.environ.get(GPU_DEPLOYMENT):
        check_training_machine(config)
    check_places(config)
    _check_vllm_finds_weights(config)
    check_template(config)
    sources(config.environment)
    check_curriculum(config)
    check_environments(rewards_of(config), config.environment.is_used)
    own_code.sources(config.data)
    asked = training_sources(config.data)
    num_prompts = [ASSUMED_PROMPTS if needs_loading(source.data) else count_prompts(source) for source in asked]
    plan = make_plan(plan_inputs(config, *num_prompts))
    if config.rollout.engine == "recorded":
        check_recording(config, replace(plan, rollouts=1), run_folder(config.name))
    return plan


def _check_vllm_finds_weights(config: RunConfig) -> None:
    """vLLM takes the path of a model's folder for a pattern."""
    places = {"model.name_or_path": config.model.name_or_path, "GRPO_STORAGE": str(storage_root())}
    for name, place in places.items():
        if config.rollout.engine == "vllm" and place != glob.escape(place):
            raise ConfigError(
                f"{name} = {place!r}: vLLM takes '[', '*' and '?' in a path for a pattern and would find no "
                "weights; use a folder without them, or rollout.engine = 'transformers'"
            )
