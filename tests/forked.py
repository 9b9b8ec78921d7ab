"""Processes forked from one that has imported vLLM: the import costs more than what most tests do with it."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.forkserver_preload"])


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns, or raises, in a new process. Function, arguments and result can be pickled."""
    with ProcessPoolExecutor(1, mp_context=_context) as pool:
        return pool.submit(function, *arguments).result()


def train(run: Path) -> list[dict[str, float]]:
    """Train a run directory in a new process; its metrics, one row per update."""
    call(_train, run, dict(os.environ))
    return [json.loads(line) for line in (run / "training" / "metrics.jsonl").read_text().splitlines()]


def _train(run: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)  # a forked process has the environment of the first call
    from grpo_core.training.loop import train

    train(run, run / "training")
