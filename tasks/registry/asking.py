"""Whether a model version answers as in its evaluation: asked in a process of its own, told by the version's tags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_core.config.run import RunConfig
from grpo_core.planning.nvidia import visible_devices
from grpo_core.system.memory import GIB, available_memory, gib_text
from tasks.processes.gpus.locks import one_free_gpu
from tasks.processes.run import ProcessError, TimeLimitError, run_process
from tasks.stages.files import read_json, remove

COMPARED, AGREEING, TIES = "served.compared", "served.agreeing", "served.ties"  # tags: numbers of prompts
REWARD = "served.reward_change"  # tag: the mean reward of the version's answers minus that of the evaluation's
SHOWN = 5  # answers that differ
FAILED = "served.failed"  # tag: why the version could not be asked
LONGEST = 500  # characters of a tag
MEMORY = 2.2  # bytes per byte of weights: the version's, and the trained policy's if an answer differs
MOST_SECONDS = 300.0  # for loading, and the answer that is under way after the last


def ask_version(config: RunConfig, run: Path, version: Path, on_gpu: bool, log: Any) -> dict[str, Any]:
    """Tags that say how many held-out prompts the version answers as in the evaluation, which was made on a GPU or not.
    Its disagreement, or its failure, is logged, and no error: only a promotion needs it."""
    if not config.registry.served_prompts:
        return {}
    output = version.with_name(version.name + ".asked.json")
    try:
        with one_free_gpu() as none_free:
            if on_gpu and (none_free or not visible_devices()):
                none_free = none_free or "this machine has none"
                return _not_asked(log, f"it was evaluated on a GPU, and none is free: {none_free}")
            if why := _too_much(config, version):
                return _not_asked(log, why)
            command = ["-m", "tasks.registry.answers", str(run), str(version), str(output)]
            run_process(command, log.info, limit=MOST_SECONDS)
        found = json.loads(output.read_text())
    except (ProcessError, TimeLimitError) as error:
        if found := read_json(output):  # and then a reward has failed, or takes too long
            log.warning("by how much the reward changes is not known: %s", error)
        elif isinstance(error, TimeLimitError) or error.restartable or "out of memory" in str(error):
            return _not_asked(log, str(error))
        else:
            log.warning("the version could not be asked as MLflow asks it: %s", error)
            return {FAILED: str(error)[-LONGEST:]}
    finally:
        remove(output)
    agreeing = found["equal"] + found["ties"]
    for each in found["differing"][:SHOWN]:
        log.warning(
            "held-out prompt %d: from token %d on, the version answers %r, in the evaluation %r", *each.values()
        )
    log.info(
        "asked as MLflow asks it, the version answers %d of %d held-out prompts as in the evaluation",
        agreeing,
        found["compared"],
    )
    change = {} if found["reward_change"] is None else {REWARD: f"{found['reward_change']:.6g}"}
    return {COMPARED: found["compared"], AGREEING: agreeing, TIES: found["ties"], **change}


def _not_asked(log: Any, why: str) -> dict[str, Any]:
    log.warning("the version is not asked as MLflow asks it: %s", why)
    return {}


def _too_much(config: RunConfig, version: Path) -> str:
    """Why this machine does not ask the version; "" if it does."""
    if len(config.environment.factories) > 1:
        return "it has several environments, and MLflow shows it the tools that all of them have"
    weights = sum(file.stat().st_size for file in (version / "model").rglob("*.safetensors"))
    if weights * MEMORY > (free := available_memory()):
        return (
            f"its weights take {gib_text(weights / GIB)}, and {gib_text(free / GIB)} of this machine's memory are free"
        )
    return ""


def disagreement(tags: Mapping[str, str], least: float) -> str:
    """Why a version with these tags may not be promoted, as part of a sentence; "" if it may. Versions that were never
    asked may."""
    if FAILED in tags:
        return f"asked as MLflow asks it, it failed: {tags[FAILED]}"
    agreeing, compared = (int(tags.get(name, 0)) for name in (AGREEING, COMPARED))
    if agreeing >= least * compared:
        return ""
    return (
        f"asked as MLflow asks it, it answers {agreeing} of {compared} held-out prompts as in the evaluation, and "
        f"promotion.served_agreement asks for {least:.0%}"
    )
