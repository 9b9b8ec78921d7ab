"""Changes that make a run fit whose forecast memory does not, each checked by the same forecast. Imports no torch."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from grpo_core.planning.memory import PlannedRun, check_engine_memory, check_host_memory, peak_memory, usable_gib
from grpo_core.planning.plan import Plan, PlanError, make_plan, plan_inputs
from grpo_core.planning.shapes import ForecastError
from grpo_core.planning.tokens_per_pass import choose_tokens

Changes = dict[str, Any]  # section.key → new value

PROCESSES = (2, 4, 8, 16, 32, 64)
TOGETHER = (2, 4, 8)  # vllm_tensor_parallel_size
SHARES = tuple(tenths / 10 for tenths in range(9, 0, -1))  # gpu_memory_utilization
SWITCHES: Changes = {  # keys of two values, and the one that takes less memory
    "train.gradient_checkpointing": True,
    "train.offload": "optimizer",
    "train.optim": "adamw_8bit",
    "model.use_peft": True,
}
SHOWN = 8
NOTHING_FITS = (
    f"neither sharding over up to {PROCESSES[-1]} processes nor recomputing, moments in the host's memory or of 8 "
    "bits, LoRA, sampling together, a smaller share for vLLM, or all of these: take a smaller model, a GPU with more "
    "memory, or shorter completions"
)


def remedies(run: PlannedRun) -> list[dict[str, Any]]:
    """Changes of the configuration whose forecast fits the GPU, with the `peak_memory_gib` and `num_processes` of each;
    `change`: in words.

    Takes the smallest number of processes that fits, and of those that sample together, and the largest of vLLM's
    shares. Kinds of change are combined only if fewer of them do not fit, or fit only on more processes. The batch of
    an update stays the same where possible.
    """
    config = run.config
    kinds = {
        "passes": [*_smaller_passes(run)],
        "sharding": [*_sharding(config)],
        **{key: [{key: value}] if _present(config, key) != value else [] for key, value in SWITCHES.items()},
        "together": [*_together(config)],
        "share": [*_smaller_share(config)],
    }
    found: dict[frozenset[str], dict[str, Any]] = {}
    for size in range(1, len(kinds) + 1):
        for chosen in map(frozenset, itertools.combinations(kinds, size)):
            if len(found) == SHOWN:
                break
            fewest = min((it["num_processes"] for parts, it in found.items() if parts < chosen), default=math.inf)
            combined = itertools.product(*(values for kind, values in kinds.items() if kind in chosen))
            merged = ({key: value for changes in parts for key, value in changes.items()} for parts in combined)
            tried = (it for it in merged if it.get("train.num_processes", config.train.num_processes) < fewest)
            if fits := next(_fitting(run, tried), None):
                found[chosen] = fits
    return [*found.values()]


def _smaller_passes(run: PlannedRun) -> Iterator[Changes]:
    """The number of tokens that would have been chosen, if another one is configured."""
    if run.config.train.max_tokens_per_pass is not None:
        yield {"train.max_tokens_per_pass": choose_tokens(run)}


def _sharding(config: RunConfig) -> Iterator[Changes]:
    """Sharding over the present processes, then over more of them, with the same batch if that can be divided."""
    train, present = config.train, config.train.num_processes
    batch = train.per_device_train_batch_size * present * train.gradient_accumulation_steps
    for processes in (present, *(it for it in PROCESSES if it > present)):
        changes: Changes = {} if train.sharding == "full" else {"train.sharding": "full"}
        if processes != present:
            changes["train.num_processes"] = processes
            if batch % processes == 0:
                rows = math.gcd(train.per_device_train_batch_size, batch // processes)
                changes["train.per_device_train_batch_size"] = rows
                changes["train.gradient_accumulation_steps"] = batch // processes // rows
        if changes and processes > 1:
            yield {key: value for key, value in changes.items() if _present(config, key) != value}


def _together(config: RunConfig) -> Iterator[Changes]:
    """More training processes that sample together, each with its part of vLLM's weights."""
    if config.rollout.engine_on(has_gpu=True) == "vllm":
        present = config.rollout.vllm_tensor_parallel_size
        yield from ({"rollout.vllm_tensor_parallel_size": it} for it in TOGETHER if it > present)


def _smaller_share(config: RunConfig) -> Iterator[Changes]:
    """Less of the GPU for vLLM in the training process."""
    if config.rollout.engine_on(has_gpu=True) == "vllm":
        present = config.rollout.memory_share
        yield from ({"rollout.gpu_memory_utilization": it} for it in SHARES if it < present)


def _fitting(run: PlannedRun, tried: Iterator[Changes]) -> Iterator[dict[str, Any]]:
    """The changes that are valid, and fit with what CUDA itself needs."""
    for changes in tried:
        try:
            config = _changed(run.config, changes)
            plan = make_plan(plan_inputs(config, *run.plan.source_sizes))
            changed = dataclasses.replace(run, config=config, plan=plan)
            check_engine_memory(changed)
            check_host_memory(changed)
            plan = dataclasses.replace(plan, max_tokens_per_pass=plan.max_tokens_per_pass or choose_tokens(changed))
            memory, usable = peak_memory(dataclasses.replace(changed, plan=plan)), usable_gib(run.gpu)
        except (ConfigError, PlanError, ForecastError):  # the last: peft does not adapt all layers of this model
            continue
        if usable is not None and memory["peak_memory_gib"] <= usable:
            yield {
                "changes": changes,
                "num_processes": plan.num_processes,
                "peak_memory_gib": memory["peak_memory_gib"],
                "change": _in_words(changes, run.plan, plan),
            }


def _present(config: RunConfig, place: str) -> Any:
    section, _, key = place.partition(".")
    return getattr(getattr(config, section), key)


def _changed(config: RunConfig, changes: Changes) -> RunConfig:
    values = config.model_dump(exclude_none=True)
    for place, value in changes.items():
        section, _, key = place.partition(".")
        values[section][key] = value
    return parse_config(values)


def _in_words(changes: Changes, before: Plan, after: Plan) -> str:
    settings = ", ".join(f"{key} = {json.dumps(value)}" for key, value in changes.items()).replace('"', "'")
    kept = "the same" if after.effective_batch_size == before.effective_batch_size else "a"
    gpus = f"{after.num_processes} GPU{'s' * (after.num_processes > 1)}"
    return f"{settings} ({gpus}, {kept} batch of {after.effective_batch_size})"
