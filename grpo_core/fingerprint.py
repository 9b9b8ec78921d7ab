"""Identity of inputs: a hash of their content, whatever their name and place."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_core.config.base import Section
from grpo_core.config.losses import LOSSES
from grpo_core.config.rollout import RolloutConfig
from grpo_core.config.run import RunConfig
from grpo_core.config.teacher import source_teachers
from grpo_core.environments.registry import sources
from grpo_core.errors import GrpoError
from grpo_core.rewards.contract import source_of
from grpo_core.rewards.registry import BUILTIN

# Raise it when the same configuration and inputs give other results: another algorithm, or the default of a key. All
# runs are then made again.
BEHAVIOUR = 1

# Keys that say which servers sample; results do not follow from them.
SERVERS = {key for key in RolloutConfig.model_fields if key.startswith("vllm_")}


# Keys of `train` that divide a batch into parts: with the same batch, results differ by rounding alone.
DIVISION = {
    "num_processes",
    "num_machines",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "max_tokens_per_pass",
    "sharding",
}


def content_hash(source: str) -> str:
    """Hash of a file's or folder's content; of the name itself if it is not a path (a hub name).

    In a folder, README.md and hidden files and folders (.cache, .gitattributes) do not count: no loader reads them.
    Raises GrpoError if this user may not read a file.
    """
    path = Path(source)
    digest = hashlib.blake2b(digest_size=16)
    if not path.exists():
        digest.update(source.encode())
        return digest.hexdigest()
    # A file's suffix says how to read it; inside a folder, the name says what it is.
    files = {path.suffix: path} if path.is_file() else {str(it.relative_to(path)): it for it in _files_read(path)}
    for name, file in files.items():
        status = file.stat()
        digest.update(name.encode())
        digest.update(_file_hash(file, status.st_size, status.st_mtime_ns))
    return digest.hexdigest()


def _files_read(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "README.md")
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


@functools.lru_cache(maxsize=4096)
def _file_hash(file: Path, size: int, modified_ns: int) -> bytes:
    """Hash of one file; size and time of modification make the cache forget a file that was written again."""
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "blake2b").digest()
    except PermissionError as error:
        raise GrpoError(f"{file.absolute()} cannot be read by this user: its owner may allow it (chmod)") from error


def determining(config: RunConfig) -> dict[str, Any]:
    """The values that results follow from: all except those at their default (a key that a later version adds makes no
    run stale; see BEHAVIOUR), those that only watch, rehearse, or limit memory and disk, `data.curriculum`, and the
    teachers that sources name (see `teacher_parts`).
    `held_out`: the values of `evaluation` that a training depends on.

    So a training can continue after a change of the limit that stopped it, and also with another number of
    processes, if the batch stays the same.
    """
    others: Any = {
        "data": {"curriculum": True, "sources": {"__all__": {"teacher"}}},
        "health": True,
        "launch": True,
        "rewards": {"__all__": {"timeout", "range", "isolated", "memory_gib"}},
        "rollout": {"recording", "max_sync_drift", "gpu_memory_utilization", "cpu_kv_cache_gib", *SERVERS},
        "environment": {"tool_timeout", "conversation_timeout", "memory_gib"} if config.environment.is_used else True,
        "train": {
            "save_steps",
            "save_total_limit",
            "max_restarts",
            "hang_timeout",
            "gradient_checkpointing",
            "torch_compile",
            "deterministic",
            "offload",
            *DIVISION,
        },
    }
    sections = {name: {} for name, value in config if isinstance(value, Section) and others.get(name) is not True}
    values: dict[str, Any] = {**sections, **config.model_dump(mode="json", exclude=others, exclude_defaults=True)}
    values["train"] |= batch_of(config) | _sharing_keys(config)
    if config.rollout.recording is not None:
        from grpo_core.data.recording import folder_of  # imports pyarrow, which takes a command long

        values["rollout"]["content of the recording"] = content_hash(str(folder_of(config.rollout)))
    if values["rollout"].keys() & {"top_p", "top_k", "min_p"}:
        # Earlier over the whole vocabulary, and then without some of those at the edge that are equally likely.
        values["rollout"]["loss"] = "over the tokens that are left, with ties"
    if config.rollout.speculation:  # samples of the same distribution, but others
        values["rollout"]["speculation"] = config.rollout.speculation
    for reward in values["rewards"]:
        record = BUILTIN.get(reward["function"])
        left_out = record.operational if record else ()
        args = reward.pop("args", {})
        if kept := {name: value for name, value in args.items() if name not in left_out}:
            reward["args"] = kept
    reported = {"confidence", "sets", "category_column", "group_column", "num_samples", "answer_pattern"}
    sampled = {key: value for key, value in values["evaluation"].items() if key not in reported}
    return {**values, "held_out": sampled if config.train.eval_steps else None}


def batch_of(config: RunConfig) -> dict[str, int]:
    """Completions per update and per generation batch; if token weights follow from it, the micro-batch too."""
    keys = config.train
    micro_step = keys.per_device_train_batch_size * keys.num_processes
    steps = keys.steps_per_generation or keys.gradient_accumulation_steps
    found = {
        "completions_per_update": micro_step * keys.gradient_accumulation_steps,
        "completions_per_generation": keys.generation_batch_size or micro_step * steps,
    }
    if LOSSES[config.algorithm.loss_type].normaliser == "micro-step":
        found["per_device_train_batch_size"] = keys.per_device_train_batch_size
    return found


def _sharing_keys(config: RunConfig) -> dict[str, int | str]:
    """Keys that say how processes share the optimizer's state, if its values follow from that: blocks of 8-bit moments
    are cut within a share."""
    if config.train.optim == "adamw" or config.train.sharding == "none":
        return {}
    within = {"num_machines": config.train.num_machines} if config.train.sharding == "hybrid" else {}
    return {"sharding": config.train.sharding, "num_processes": config.train.num_processes, **within}


def planned_values(plan: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a plan that results follow from: all except how a batch is divided."""
    return {name: value for name, value in plan.items() if name not in (*DIVISION, "micro_steps_per_epoch")}


def environment_parts(config: RunConfig) -> dict[str, Any]:
    """The parts that conversations follow from, besides the policy: the keys of `environment`, and the hash of each
    named source; empty without tools and environment."""
    if not config.environment.is_used:
        return {}
    return {**determining(config)["environment"], "sources": sources(config.environment)}


def teacher_parts(config: RunConfig) -> dict[str, Any]:
    """The parts that a training follows from with a teacher: its keys, and the hash of its content instead of its name,
    also of each source's that has another one; empty without one. A served teacher counts by its name at the server or,
    without one, by the address."""
    if not config.teacher.is_used:
        return {}
    model, url = config.teacher.model, config.teacher.url
    keys = {key: value for key, value in determining(config)["teacher"].items() if key not in ("model", "url")}
    if config.teacher.is_policy:
        return keys
    if url or not model:
        return {**keys, "served": model or url}
    others = {name: it and content_hash(it) for name, it in source_teachers(config).items() if it != model}
    return {**keys, "content": content_hash(model)} | ({"sources": others} if others else {})


def warm_start_parts(config: RunConfig) -> dict[str, Any]:
    """The keys that a warm start follows from besides those of any training; empty without one. The demonstrations
    count by their content."""
    keys = determining(config)["warm_start"]
    return {**keys, "demonstrations": True} if config.warm_start.is_used else {}


def reward_parts(config: RunConfig) -> list[dict[str, Any]]:
    """The parts that reward values follow from: each reward's determining keys, and the hash of its source. A model's
    folder counts by the hash of its content, not by its name."""
    parts: list[dict[str, Any]] = determining(config)["rewards"]
    for part, reward in zip(parts, config.rewards, strict=True):
        part["source"] = hashlib.blake2b(source_of(reward)).hexdigest()
        record = BUILTIN.get(reward.function)
        if record and (argument := record.model_argument) in part.get("args", {}):
            part["args"][argument] = content_hash(part["args"][argument])
    return parts
