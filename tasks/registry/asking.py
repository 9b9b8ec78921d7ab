"""Whether a model version answers as in its evaluation: asked in a process of its own, told by the version's tags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from grpo_core.config.run import RunConfig
from grpo_core.system.memory import GIB, gib_text
from tasks.processes.gpus.locks import one_free_gpu
from tasks.processes.run import ProcessError, run_process
from tasks.stages.files import remove

COMPARED, AGREEING, TIES = "served.compared", "served.agreeing", "served.ties"  # tags: numbers of prompts
FAILED = "served.failed"  # tag: why the version could not be asked
LONGEST = 500  # characters of a tag
WEIGHTS, MEMORY = ".safetensors", 1.5  # bytes of memory per byte of weights, for the version and what asks it


def ask_version(config: RunConfig, run: Path, version: Path, log: Any) -> dict[str, Any]:
    """Tags that say how many held-out prompts the version answers as in the evaluation. Its disagreement, or its
    failure, is logged, and no error: only a promotion needs it."""
    if not config.registry.served_prompts:
        return {}
    weights = sum(file.stat().st_size for file in version.rglob("*" + WEIGHTS))
    if weights * MEMORY > (free := psutil.virtual_memory().available):
        log.warning(
            "the version is not asked as MLflow asks it: its weights take %s, and of this machine's memory %s are free",
            gib_text(weights / GIB),
            gib_text(free / GIB),
        )
        return {}
    output = version.with_name(version.name + ".asked.json")
    try:
        with one_free_gpu():
            run_process(["-m", "tasks.registry.agreement", str(run), str(version), str(output)], log.info)
        found = json.loads(output.read_text())
    except ProcessError as error:
        log.warning("the version could not be asked as MLflow asks it: %s", error)
        return {FAILED: str(error)[-LONGEST:]}
    finally:
        remove(output)
    agreeing = found["equal"] + found["ties"]
    for each in found["differing"]:
        log.warning("held-out prompt %d: the version answers %r, in the evaluation %r", *each.values())
    log.info(
        "asked as MLflow asks it, the version answers %d of %d held-out prompts as in the evaluation",
        agreeing,
        found["compared"],
    )
    return {COMPARED: found["compared"], AGREEING: agreeing, TIES: found["ties"]}


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
