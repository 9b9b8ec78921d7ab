"""Whether a training would refuse its model: tried once, in a process of its own, and kept in STORAGE/tried/."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress

from grpo_core.config.run import RunConfig
from grpo_core.planning.hardware import Gpu
from grpo_core.planning.shapes import ForecastError, config_file
from tasks.processes.pace import LIMIT_SECONDS, MEASURED
from tasks.processes.run import run_process
from tasks.processes.training_machine import training_packages, training_version
from tasks.stages.dependencies import hash_values
from tasks.stages.errors import StageError
from tasks.stages.files import read_json, write_text
from tasks.stages.run_directory import storage_root


def check_model(config: RunConfig, prompt_tokens: int, gpu: Gpu | None, say: Callable[[str], None]) -> None:
    """Raises StageError if the training would refuse a small copy of the model, and ConfigError for keys that do not go
    with this machine. `prompt_tokens`: of the longest prompt.

    Takes some seconds the first time, which `say` announces. Does nothing if the model's config.json is not here.
    """
    has_gpu = gpu is not None or config.launch.launcher != "local"
    config.check_replay(has_gpu)
    if os.environ.get(MEASURED) == "0":
        return
    try:
        shape = config_file(config.model.name_or_path, config.model.revision).read_text()
    except ForecastError:
        return
    model = config.model.model_dump(mode="json", exclude={"adapter", "load_in_4bit"})
    request = {
        "engine": config.rollout.engine_on(has_gpu),
        "bf16": config.train.mixed_precision == "bf16",
        "gradient_checkpointing": config.train.gradient_checkpointing,
        "router_keys": config.algorithm.router_keys,
        "max_length": prompt_tokens + config.rollout.max_completion_length,
    }
    known = {**model, "name_or_path": shape, "revision": None}
    versions = training_version(), training_packages(("transformers", "peft"))
    file = storage_root() / "tried" / f"{hash_values(request, known, versions)}.json"
    if not (found := read_json(file)):
        say("a small copy of the model is tried as a training would begin with it, once, in some seconds")
        printed: list[str] = []
        command = ["-m", "grpo_core.try_small", json.dumps({**request, "model": model})]
        try:
            run_process(
                command, printed.append, {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}, limit=LIMIT_SECONDS
            )
            found = json.loads(printed[-1])
        except (StageError, ValueError, IndexError) as error:
            found = {"untried": f"{printed[-1] if printed else error}"}
        else:
            with suppress(OSError):  # a full disk
                file.parent.mkdir(parents=True, exist_ok=True)
                write_text(file, json.dumps(found) + "\n")
    if found.get("untried"):
        say(f"whether the training takes this model was not tried on a small copy of it: {found['untried']}")
    if found.get("refused"):
        raise StageError(f"the training would refuse this model: {found['refused']}")
