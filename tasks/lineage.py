"""Lineage keys: a stage's output is good for as long as what it depends on is the same.

A key is a hash over exactly that: the stage's part of the configuration, the keys of the stages before it, the content
of data and base model, the reward functions' source, the version of grpo_core.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import grpo_core
from grpo_core.config import RunConfig
from grpo_core.fingerprint import content_hash, reward_parts

DIGITS = 12  # of a hash that people read


def lineage_keys(config: RunConfig) -> dict[str, str]:
    """The key of each stage, in the order in which they run."""
    part, rewards = config.determining(), reward_parts(config)
    # Inputs are known by their content: another name or place of the same is no reason to run a stage again.
    part["data"] |= {"train": content_hash(config.data.train), "eval": content_hash(config.data.eval)}
    part["model"]["name_or_path"] = content_hash(config.model.name_or_path)
    data = key_of(
        grpo_core.__version__,
        part["data"],
        rewards,
        part["model"]["name_or_path"],
        config.model.revision,
        config.rollout.max_completion_length,
    )
    limits = [(reward.timeout, reward.range) for reward in config.rewards]
    sets = [(each.name, each.split, content_hash(each.data)) for each in config.evaluation.sets]
    part["evaluation"]["sets"] = sets
    validate = key_of(data, limits, config.data.answer_column, config.evaluation_length, sets)
    steps = key_of(data, part["rollout"], part["train"])
    plan = key_of(steps, part["model"], config.algorithm.beta, config.train.gradient_checkpointing)  # its forecasts
    train = key_of(steps, config.seed, part["model"], part["algorithm"], part["held_out"])
    evaluate = key_of(train, part["evaluation"], config.data.answer_column)
    rules = config.promotion.model_dump(mode="json", exclude={"automatic"})  # a version is judged by those it records
    register = key_of(evaluate, part["registry"], config.name, rules)
    return {"validate": validate, "plan": plan, "train": train, "evaluate": evaluate, "register": register}


def key_of(*parts: Any) -> str:
    """Hash of values that JSON can say."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()
