"""Costs of a run: GPU hours, tokens, and money if the configuration has a price."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_core import run_files
from grpo_core.config.run import RunConfig
from tasks.rendering import figures
from tasks.stages.files import read_json
from tasks.stages.table import EVALUATE, PROBE, TRAIN, WARM_START
from tasks.tracking.runs import HARDWARE, RUN_FILE

NO_GPU = "CPU"  # prefix of the name of hardware without a GPU


@dataclass(frozen=True)
class Cost:
    """Cost of a run. `gpu_hours`: GPUs held by probe, warm start, training and evaluation, with their vLLM servers,
    times the hours of these stages; None without a GPU, or if the hardware is unknown. `at_least`: True if the training
    was interrupted, since only the updates of interrupted attempts count. `tokens`: completion tokens that the training
    sampled, None before it has finished. `price`: per GPU hour; None if the configuration has none.
    """

    gpu_hours: float | None
    at_least: bool
    tokens: int | None
    price: float | None

    @property
    def money(self) -> float | None:
        return None if self.gpu_hours is None or self.price is None else self.gpu_hours * self.price

    @property
    def metrics(self) -> dict[str, float]:
        """The cost as MLflow metrics."""
        known = {"cost/gpu_hours": self.gpu_hours, "cost/money": self.money, "cost/sampled_tokens": self.tokens}
        return {name: float(value) for name, value in known.items() if value is not None}

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield (name, figure) for people."""
        front = "at least " if self.at_least else ""
        yield "completion tokens sampled", figures.NONE if self.tokens is None else f"{self.tokens:,}"
        yield "GPU hours", figures.NONE if self.gpu_hours is None else f"{front}{figures.number(self.gpu_hours)}"
        if self.money is not None:
            yield f"cost at {self.price:g} per GPU hour", f"{front}{self.money:,.2f}"


def sum_metrics(costs: Iterable[Cost]) -> dict[str, float]:
    """Sum the metrics that all of these costs have, for example a sweep's arms."""
    each = [it.metrics for it in costs]
    return {name: sum(it[name] for it in each) for name in each[0] if all(name in it for it in each)}


def run_cost(run: Path, config: RunConfig) -> Cost:
    """Compute the cost of a run under the storage root whose training has finished."""
    seconds = (stage.read_receipt(run).get("seconds", 0.0) for stage in (EVALUATE, PROBE, WARM_START))
    return training_cost(TRAIN.path(run), config, *seconds)


def training_cost(training: Path, config: RunConfig, *other_seconds: float) -> Cost:
    """Compute the cost of the training in this folder: of an unfinished one, of its recorded updates.
    `other_seconds`: of the other stages that use GPUs, see `cost_of`."""
    result, hardware = read_json(training / run_files.RESULT), read_json(training / RUN_FILE).get(HARDWARE, "")
    if not result:
        seconds = sum(_update_seconds(training / run_files.METRICS))
        result = {"interrupted": True, "train_seconds": seconds, "sampled_tokens": None}
    return cost_of(config, hardware, result, *other_seconds)


def _update_seconds(metrics: Path) -> Iterator[float]:
    for line in metrics.read_text().splitlines() if metrics.exists() else ():
        with suppress(ValueError):  # a process that was killed may have left part of a line
            yield json.loads(line)["step_time"]


def cost_of(
    config: RunConfig,
    hardware: str,
    result: Mapping[str, Any],
    evaluation_seconds: float = 0.0,
    probe_seconds: float = 0.0,
    warm_start_seconds: float = 0.0,
) -> Cost:
    """Compute the cost of a run. hardware: where it was trained, "" if unknown; result: receipt of train, or of an
    unfinished training what `training_cost` makes of its updates."""
    train, servers = config.train, config.rollout.server_gpus
    interrupted = bool(result.get("interrupted") or result["resumed_at_step"])
    training_seconds = max(result.get("seconds", 0.0), result["train_seconds"])
    evaluating = config.where_evaluated.train.num_processes + servers
    seconds = (training_seconds + probe_seconds) * (train.num_processes + servers) + evaluation_seconds * evaluating
    seconds += warm_start_seconds * train.num_processes  # it has no servers
    has_gpu = bool(hardware) and not hardware.startswith(NO_GPU)
    return Cost(
        seconds / 3600 if has_gpu else None, interrupted, result["sampled_tokens"], config.launch.gpu_hour_price
    )
