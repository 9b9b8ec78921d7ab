"""Processes forked from one that has imported vLLM: the import costs more than what most tests do with it."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tests.held import held
from tests.needs import VLLM, needs

# Installed modules only: what cannot be imported is left out without a word, as `tests` would be.
PRELOADED = (
    "vllm.entrypoints.llm",
    "vllm.lora.model_manager",
    "vllm.model_executor.layers.fused_moe.fused_moe_method_base",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "grpo_core.rollout.vllm.colocated_engine",
    "grpo_core.training.loop",
)
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([*PRELOADED])


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns, or raises, in a new process. Function, arguments and result can be pickled.

    vLLM does not compile its counting of ranks there, which nothing here reads. Nor do its searches for garbage pass
    through all that is imported. An engine need not be closed, which takes a second: it ends with the process.
    """
    needs(*VLLM)
    with (
        held(os.environ, {"TORCH_COMPILE_DISABLE": "1"}),
        ProcessPoolExecutor(1, mp_context=_context, initializer=gc.freeze) as pool,
    ):
        return pool.submit(function, *arguments).result()


def imported() -> set[str]:
    return {*sys.modules}


def train(run: Path) -> list[dict[str, float]]:
    """Train a run directory in a new process; its metrics, one row per update."""
    call(_train, run, dict(os.environ))
    return [json.loads(line) for line in (run / "training" / "metrics.jsonl").read_text().splitlines()]


def _train(run: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)  # a forked process has the environment of the first call
    from grpo_core.training.loop import train

    train(run, run / "training")
