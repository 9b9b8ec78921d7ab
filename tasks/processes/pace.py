"""The pace of this machine with a run's model: measured once, in a process of its own, and kept in STORAGE/pace/."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from grpo_core.config.run import RunConfig
from grpo_core.planning.hardware import Gpu, name_hardware
from grpo_core.planning.pace import Pace, pace_request
from grpo_core.planning.plan import Plan
from grpo_core.planning.shapes import ForecastError, PromptLengths, config_file
from tasks.processes.gpus.locks import one_free_gpu
from tasks.processes.run import TimeLimitError, run_process
from tasks.processes.training_machine import training_packages
from tasks.stages.dependencies import hash_values
from tasks.stages.errors import StageError
from tasks.stages.files import write_text
from tasks.stages.run_directory import storage_root

MEASURED = "GRPO_MEASURE"  # environment variable; "0": measure nothing
LIMIT_SECONDS = 120.0
PACKAGES = ("grpo-flows", "torch", "transformers")


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
    printed: list[str] = []
    busy = os.getloadavg()[0] > (os.cpu_count() or 1)
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    with one_free_gpu() as none_free:
        if none_free:
            return f"no earlier run is known, and the pace is not measured, since no GPU is free: {none_free}"
        say(
            "no earlier run of this model is known: measuring its pace on this machine, for "
            f"{LIMIT_SECONDS:.0f} s at most"
        )
        try:
            command = ["-m", "grpo_core.pace", content, str(time.time())]
            run_process(command, printed.append, environment, limit=LIMIT_SECONDS)
            found = json.loads(printed[-1])
        except TimeLimitError:
            return f"no earlier run is known, and this machine did not measure its pace within {LIMIT_SECONDS:.0f} s"
        except StageError:
            return (
                f"no earlier run is known, and the pace could not be measured: {printed[-1] if printed else 'killed'}"
            )
    if "refused" in found:
        raise StageError(f"the training would refuse this model: {found['refused']}")
    pace = Pace(**found)
    if busy:  # not kept, since it would be wrong on a quiet machine
        return replace(pace, how=f"{pace.how}, while other processes kept the machine busy")
    with suppress(OSError):  # a full disk, or another process writes the same answer
        write_text(file, json.dumps(asdict(pace), indent=2) + "\n")
    return pace


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
