"""Lineage keys: a stage's output is good for as long as what it depends on is the same.

A key is a hash over exactly that: the stage's part of the configuration, the keys of the stages before it, the content
of data and base model, the reward functions' source, the version of grpo_core.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import grpo_core
from grpo_core.config.base import flatten
from grpo_core.config.run import RunConfig
from grpo_core.fingerprint import content_hash, determining, reward_parts

DIGITS = 12  # of a hash that people read


def lineage_keys(config: RunConfig) -> dict[str, str]:
    """The key of each stage, in the order in which they run."""
    return {stage: key_of(inputs) for stage, inputs in lineage_inputs(config).items()}


def lineage_inputs(config: RunConfig) -> dict[str, dict[str, Any]]:
    """What the output of each stage depends on, by the names that people read: configuration keys and their values,
    hashes of contents and sources. Inputs are known by their content: the same under another name or in another place
    is no reason to run a stage again."""
    part = determining(config)

    def section(name: str) -> dict[str, Any]:
        return flatten({name: part[name]})

    answers = {"data.answer_column": config.data.answer_column}
    model = {
        "content of the base model": content_hash(config.model.name_or_path),
        "model.revision": config.model.revision,
    }
    data = {
        "version of grpo_core": grpo_core.__version__,
        **section("data"),
        "data.train": content_hash(config.data.train),
        "data.eval": content_hash(config.data.eval),
        **model,
        **_rewards(config),
        "rollout.max_completion_length": config.rollout.max_completion_length,
    }
    sets = {f"evaluation.sets {each.name}": [each.split, content_hash(each.data)] for each in config.evaluation.sets}
    limits = {
        f"rewards.{place}.{key}": value
        for place, reward in enumerate(config.rewards)
        for key, value in reward.model_dump(include={"timeout", "range", "isolated", "memory_gib"}).items()
    }
    length = {"evaluation.max_completion_length": config.evaluation_length}
    validate = data | limits | answers | length | sets
    steps = data | section("rollout") | section("train")
    settings = section("model") | model
    del settings["model.name_or_path"]
    memory = {  # of which only the forecasts know
        "algorithm.beta": config.algorithm.beta,
        "train.gradient_checkpointing": config.train.gradient_checkpointing,
    }
    held_out = {
        f"{name} (while training)": value for name, value in flatten({"evaluation": part["held_out"] or {}}).items()
    }
    train = steps | {"seed": config.seed} | settings | section("algorithm") | held_out
    of_evaluation = {
        key: value for key, value in section("evaluation").items() if not key.startswith("evaluation.sets.")
    }
    evaluate = train | of_evaluation | sets | answers
    rules = config.promotion.model_dump(mode="json", exclude={"automatic"})  # a version is judged by those it records
    register = evaluate | section("registry") | {"name": config.name} | flatten({"promotion": rules})
    plan = steps | settings | memory
    return {"validate": validate, "plan": plan, "train": train, "evaluate": evaluate, "register": register}


def what_changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The names under which two stages' inputs differ, as `lineage_inputs` gives them; `before` may be from JSON."""
    now = json.loads(json.dumps(after))
    return [
        name for name in {**before, **now} if before.get(name) != now.get(name) or (name in before) != (name in now)
    ]


def _rewards(config: RunConfig) -> dict[str, Any]:
    """Each reward's keys, its arguments one by one, and the hash of its source."""
    found: dict[str, Any] = {}
    for place, reward in enumerate(reward_parts(config)):
        name, args = f"rewards.{place}", reward.pop("args")
        found |= {f"source of {name} ({reward['function']})": reward.pop("source")}
        found |= {f"{name}.{key}": value for key, value in reward.items()}
        found |= {f"{name}.args.{key}": value for key, value in args.items()}
    return found


def key_of(*parts: Any) -> str:
    """Hash of values that JSON can say."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()
