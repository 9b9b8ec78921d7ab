"""Lineage keys: a stage's output is good for as long as what it depends on is the same.

A key is a hash over exactly that: the stage's part of the configuration, the keys of the stages before it, the content
of data and base model, the reward functions' source, the version of grpo_core.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import grpo_core
from grpo_core.config import RunConfig
from grpo_core.rewards.contract import source_of


def lineage_keys(config: RunConfig) -> dict[str, str]:
    """The key of each stage, in the order in which they run."""
    part = config.determining()
    model = content_hash(config.model.name_or_path)
    rewards = [hashlib.blake2b(source_of(reward)).hexdigest() for reward in config.rewards]
    classifiers = [reward for reward in config.rewards if reward.function == "classifier"]
    scorers = [content_hash(reward.args.get("model", "")) for reward in classifiers]
    completion_length = config.rollout.max_completion_length
    data = key_of(
        grpo_core.__version__,
        part["data"],
        content_hash(config.data.train),
        content_hash(config.data.eval),
        part["rewards"],
        rewards,
        scorers,
        config.model.name_or_path,
        config.model.revision,
        model,
        completion_length,
    )
    limits = [(reward.timeout, reward.range) for reward in config.rewards]
    sets = [(each.name, each.split, each.data, content_hash(each.data)) for each in config.evaluation.sets]
    validate = key_of(data, limits, config.data.answer_column, config.evaluation_length, sets)
    steps = key_of(data, part["rollout"], part["train"])
    plan = key_of(steps, part["model"], config.algorithm.beta, config.train.gradient_checkpointing)  # its forecasts
    train = key_of(steps, config.seed, part["model"], part["algorithm"], part["held_out"])
    evaluate = key_of(train, part["evaluation"], sets, config.data.answer_column)
    rules = config.promotion.model_dump(mode="json", exclude={"automatic"})  # a version is judged by those it records
    register = key_of(evaluate, part["registry"], config.name, rules)
    return {"validate": validate, "plan": plan, "train": train, "evaluate": evaluate, "register": register}


def content_hash(source: str) -> str:
    """Hash of a file's or folder's content; of the name itself where it is no path (a hub name)."""
    path = Path(source)
    digest = hashlib.blake2b(digest_size=16)
    if not path.exists():
        digest.update(source.encode())
        return digest.hexdigest()
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        status = file.stat()
        digest.update(str(file.relative_to(path)).encode())
        digest.update(_file_hash(file, status.st_size, status.st_mtime_ns))
    return digest.hexdigest()


@functools.lru_cache(maxsize=4096)
def _file_hash(file: Path, size: int, modified_ns: int) -> bytes:
    """Hash of one file; size and time of modification make the cache forget a file that was written again."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").digest()


def key_of(*parts: Any) -> str:
    """Hash of values that JSON can say."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()
