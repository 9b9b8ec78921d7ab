"""What a plan finds out by trying, in processes of their own: whether the training would refuse its model, kept in
STORAGE/tried/, and the pace of this machine with it, kept in STORAGE/pace/."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from grpo_core.config.run import RunConfig
from grpo_core.planning.hardware import Gpu, name_hardware
from grpo_core.planning.pace import Pace, pace_request
from grpo_core.planning.plan import Plan
from grpo_core.planning.shapes import ForecastError, PromptLengths, config_file
from tasks.processes.gpus.locks import one_free_gpu
from tasks.processes.run import TimeLimitError, run_process
from tasks.processes.training_machine import training_packages, training_version
from tasks.stages.dependencies import hash_values
from tasks.stages.errors import StageError
from tasks.stages.files import read_json, write_text
from tasks.stages.run_directory import storage_root

MEASURED = "GRPO_MEASURE"  # environment variable; "0": try and measure nothing
LIMIT_SECONDS = 120.0
PACKAGES = ("grpo-flows", "torch", "transformers")


def check_model(config: RunConfig, prompt_tokens: int, gpu: Gpu | None, say: Callable[[str], None]) -> None:
    """Raises StageError if the training would refuse a small copy of the model, and ConfigError for keys that do not go
    with this machine. `prompt_tokens`: of the longest prompt.

    Takes some seconds the first time, which `say` announces. Does nothing if the model's config.json is not here.
    """
    has_gpu = gpu is not None or config.launch.launcher != "local"
    config.check_replay(has_gpu)
    keys = config.model.model_dump(mode="json", exclude={"adapter", "load_in_4bit"})
    try:
        shape = config_file(config.model.name_or_path, config.model.revision).read_text()
    except ForecastError:
        return
    if os.environ.get(MEASURED) == "0":
        return
    request = {
        "engine": config.rollout.engine_on(has_gpu),
        "bf16": config.train.mixed_precision == "bf16",
        "gradient_checkpointing": config.train.gradient_checkpointing,
        "router_keys": config.algorithm.router_keys,
        "max_length": prompt_tokens + config.rollout.max_completion_length,
    }
    known = {**keys, "name_or_path": shape, "revision": None}
    identity = hash_values(request, known, training_version(), training_packages(("transformers", "peft")))
    file = storage_root() / "tried" / f"{identity}.json"
    if not (found := read_json(file)):
        say("a small copy of the model is tried as a training would begin with it, once, in some seconds")
        command = ["-m", "grpo_core.try_small", json.dumps({**request, "model": keys})]
        try:
            found = _answer(command, {"CUDA_VISIBLE_DEVICES": ""})
        except StageError as error:
            found = {"untried": str(error)}
        with suppress(OSError):  # a full disk
            if not found.get("untried"):  # which may have a passing cause
                file.parent.mkdir(parents=True, exist_ok=True)
                write_text(file, json.dumps(found) + "\n")
    if found.get("untried"):
        say(f"whether the training takes this model was not tried on a small copy of it: {found['untried']}")
    if found.get("refused"):
        raise StageError(f"the training would refuse this model: {found['refused']}")


def measured_pace(
    config: RunConfig,
    plan: Plan,
    lengths: PromptLengths,
    gpu: Gpu | None,
    prompts: Path | None,
    say: Callable[[str], None],
) -> Pace | str:
    """Measure the pace with this model and these batch sizes, or return why that failed. `prompts`: validated prompts,
    if there are any. Raises StageError if the training would refuse the model.

    Takes some seconds the first time, which `say` announces, and meanwhile one GPU, if the machine has any: none is
    waited for, and none is shared. The result is kept, unless other processes kept the machine busy.
    """
    if os.environ.get(MEASURED) == "0":
        return f"no earlier run of this model on this hardware ({name_hardware(gpu)}) is known, and {MEASURED}=0"
    folder, threads = storage_root() / "pace", max(1, (os.cpu_count() or 1) // config.train.processes_per_machine)
    try:
        identity = _identity(config, gpu, prompts)
    except ForecastError as error:
        return str(error)
    request = asdict(pace_request(config, plan, lengths, prompts, folder, threads, identity))
    content = json.dumps(request, sort_keys=True)
    file = folder / f"{hash_values(content)}.json"
    if known := _read_kept(file):
        return known
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return (
            f"no earlier run is known, and the pace cannot be measured: {folder} has to be writable: {error.strerror}"
        )
    busy = os.getloadavg()[0] > (os.cpu_count() or 1)
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    with one_free_gpu() as none_free:
        if none_free:
            return f"no earlier run is known, and the pace is not measured, since no GPU is free: {none_free}"
        say(
            "no earlier run of this model is known: measuring its pace on this machine, for "
            f"{LIMIT_SECONDS:.0f} s at most"
        )
        try:
            found = _answer(["-m", "grpo_core.pace", content, str(time.time())], environment)
        except TimeLimitError:
            return f"no earlier run is known, and this machine did not measure its pace within {LIMIT_SECONDS:.0f} s"
        except StageError as error:
            return f"no earlier run is known, and the pace could not be measured: {error}"
    if "refused" in found:
        raise StageError(f"the training would refuse this model: {found['refused']}")
    pace = Pace(**found)
    if busy:  # not kept, since it would be wrong on a quiet machine
        return replace(pace, how=f"{pace.how}, while other processes kept the machine busy")
    with suppress(OSError):  # a full disk, or another process writes the same answer
        write_text(file, json.dumps(asdict(pace), indent=2) + "\n")
    return pace


def _answer(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """What a process prints last, as JSON. Raises StageError with its last line if it fails."""
    printed: list[str] = []
    try:
        run_process(command, printed.append, {"HF_HUB_OFFLINE": "1", **environment}, limit=LIMIT_SECONDS)
        return json.loads(printed[-1])
    except TimeLimitError:
        raise
    except (StageError, ValueError, IndexError) as error:
        raise StageError(printed[-1] if printed else str(error)) from error


def _read_kept(file: Path) -> Pace | None:
    """The pace in a file; None if the file is missing or damaged."""
    with suppress(OSError, ValidationError):
        return TypeAdapter(Pace).validate_json(file.read_bytes())
    return None


def _identity(config: RunConfig, gpu: Gpu | None, prompts: Path | None) -> str:
    """Hash of everything except sizes that a pace depends on: model files, prompts, hardware, versions. Raises
    ForecastError if the model is not on this machine."""
    shape = config_file(config.model.name_or_path, config.model.revision)
    files = [*sorted(shape.parent.glob("*.safetensors")), *([prompts] if prompts else [])]
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    versions = [*training_packages(PACKAGES).values()]
    return hash_values(shape.read_text(), stats, platform.node(), name_hardware(gpu), versions)
