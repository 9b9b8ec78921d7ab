"""Writes a trained model in each format of `publish.formats`."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from tasks.processes.run import run_process
from tasks.publishing import llm_compressor
from tasks.stages.files import WEIGHTS, link

QUANTIZE_PYTHON = "GRPO_QUANTIZE_PYTHON"
BITS = {"int8": "8", "int4": "4"}
ANSWER_SECONDS = 120.0
FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec('llmcompressor') is None)"


def check_formats(config: RunConfig) -> None:
    """Raises ConfigError if a format needs llm-compressor and GRPO_QUANTIZE_PYTHON names no Python that has it, or if
    it cannot be evaluated."""
    rounded = [it for it in config.publish.formats if it != "huggingface"]
    if rounded and config.rollout.engine == "vllm-server" and config.train.mixed_precision == "no":
        raise ConfigError(
            f"publish.formats has {rounded[0]!r}, which is evaluated in bfloat16, and vLLM servers compute in float32 "
            "with train.mixed_precision = 'no'; remove it, or sample by another engine"
        )
    asked = [it for it in config.publish.formats if it in BITS]
    if not asked:
        return
    python, problem = os.environ.get(QUANTIZE_PYTHON, ""), "it is not set"
    if python:
        try:
            done = subprocess.run([python, "-c", FIND], capture_output=True, text=True, timeout=ANSWER_SECONDS)
            problem = (done.stderr.strip().splitlines() or ["llmcompressor is not installed there"])[-1]
            if not done.returncode:
                return
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
    raise ConfigError(
        f"publish.formats has {asked[0]!r}, which llm-compressor makes in the Python that {QUANTIZE_PYTHON} names "
        f"({python!r}: {problem}): `uv venv quantize && uv pip install --python quantize llmcompressor`, then export "
        f"{QUANTIZE_PYTHON}=$PWD/quantize/bin/python; or remove {asked[0]!r}"
    )


def write_format(made: str, model: Path, folder: Path, dense: Path, log: Any) -> Path:
    """Write the trained model to `folder` in a format. Returns the folder to be evaluated: the same, or for codes
    `dense`, which has the weights that they stand for."""
    if made == "huggingface":
        shutil.copytree(model, folder, copy_function=link)
        return folder
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns(f"*{WEIGHTS}"))
    if made == "bfloat16":
        run_process(["-m", "tasks.publishing.bfloat16", str(model), str(folder)], log.info)
        return folder
    for index in folder.glob("*.index.json"):  # of the weights that are left out
        index.unlink()
    shutil.copytree(folder, dense)
    command = [str(Path(llm_compressor.__file__)), *map(str, (model, folder, dense)), BITS[made]]
    run_process(command, log.debug, {"CUDA_VISIBLE_DEVICES": ""}, python=os.environ[QUANTIZE_PYTHON])
    for file in model.glob("generation_config.json"):
        for place in (folder, dense):
            shutil.copy2(file, place)
    return dense
