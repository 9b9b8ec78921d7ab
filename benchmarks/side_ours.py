"""Runs our side of a comparison in a process of its own: trains on a workload and records when each step ended.

    python -m benchmarks.side_ours FOLDER SETTINGS RESULT

SETTINGS is JSON: `precision` ("no" or "bf16"); `engine`, `seed`, `processes` and `sharding`, by default "transformers",
0, 1 and "none"; `keys`, further keys of the configuration, such as {"train.save_steps": 1}.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
from transformers import AutoTokenizer

from benchmarks.clock import Clock
from benchmarks.workload import Workload, read, reward
from grpo_core.planning.shapes import PromptLengths


def run_directory(workload: Workload, folder: Path, run: Path, settings: dict[str, Any]) -> None:
    """Make a run directory as the stages validate and plan leave it."""
    from grpo_core.config.files import dump_config, parse_config
    from grpo_core.planning.hardware import find_gpu
    from grpo_core.planning.plan import make_plan, plan_inputs
    from grpo_core.planning.tokens_per_pass import with_tokens_per_pass

    num_prompts = pq.read_metadata(folder / "prompts.parquet").num_rows
    replay = workload.mode == "replay"
    values: dict[str, Any] = {
        "name": "benchmark",
        "seed": settings.get("seed", 0),
        "model": {"name_or_path": str(folder / "model")},
        "data": {"train": str(folder / "prompts.parquet"), "eval": str(folder / "prompts.parquet")},
        "rewards": [{"function": f"{reward(workload).__module__}:{reward(workload).__name__}"}],
        "rollout": {
            "engine": settings.get("engine", "transformers"),
            "num_generations": workload.group,
            "max_completion_length": workload.completion,
        },
        # Stored completions were not sampled from the policy, so there is nothing to correct.
        "algorithm": {"vllm_importance_sampling_correction": not replay},
        "train": {
            "mixed_precision": settings["precision"],
            "num_processes": settings.get("processes", 1),
            "sharding": settings.get("sharding", "none"),
            "offload": settings.get("offload", "none"),
            "per_device_train_batch_size": workload.completions // settings.get("processes", 1),
            "max_steps": workload.steps,
            "learning_rate": 1e-4,
            "lr_scheduler_type": "constant",
        },
    }
    for key, value in settings.get("keys", {}).items():
        section, _, name = key.partition(".")
        values[section][name] = value
    config = parse_config(values)
    (run / "dataset").mkdir(parents=True)
    (run / "dataset" / "train.parquet").symlink_to(folder / "prompts.parquet")
    (run / "config.toml").write_text(dump_config(config))
    plan = with_tokens_per_pass(
        config, make_plan(plan_inputs(config, num_prompts)), prompt_lengths(workload), find_gpu()
    )
    (run / "plan.json").write_text(json.dumps({"plan": asdict(plan)}))


def prompt_lengths(workload: Workload) -> PromptLengths:
    """Lengths of the workload's prompts, as the plan takes them."""
    low, high = workload.prompt_lengths
    return PromptLengths((low + high) / 2, high, "by the workload")


@contextmanager
def replayed(workload: Workload, folder: Path) -> Iterator[None]:
    """Make generation batches of the stored completions, if there are any. The engine answers all other requests, such
    as those of the probe."""
    from grpo_core.rollout.collect import BatchRequest, collect
    from grpo_core.training import roll_out

    if workload.mode != "replay":
        yield
        return
    engine = SimpleNamespace(generate=stored(folder))

    def collect_stored(request: BatchRequest, *more: Any) -> Any:
        return collect(replace(request, engine=engine), *more)

    with mock.patch.object(roll_out, "collect", collect_stored):
        yield


def stored(folder: Path) -> Callable[..., Any]:
    """Make an `Engine.generate` that returns the workload's stored completions, those of one step per call."""
    from grpo_core.rollout.types import Completion, Finished, Request, Sampling

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    steps = iter(json.loads((folder / "completions.json").read_text()))

    def generate(requests: Sequence[Request], sampling: Sampling) -> Iterator[list[Finished]]:
        step = next(steps)
        groups = [step[int(str(tokenizer.decode(request.prompt_ids[:4])))] for request in requests]
        yield [
            (number, [Completion(ids, [0.0] * len(ids), truncated=len(ids) == sampling.max_tokens) for ids in group])
            for number, group in enumerate(groups)
        ]

    return generate


def main(folder: Path, settings: dict[str, Any], result: Path) -> None:
    from grpo_core.training.log import TrainingLog
    from grpo_core.training.loop import train

    workload = read(folder)
    clock = Clock(workload.warm_up)
    record, set_up = TrainingLog.step, TrainingLog.__init__
    metrics: list[dict[str, float]] = []

    def begin(self: Any, *arguments: Any, **keys: Any) -> None:
        set_up(self, *arguments, **keys)
        clock.begin()

    def step(self: Any, number: int, values: dict[str, float]) -> None:
        record(self, number, values)
        clock.step()
        metrics.append(values)

    watched = mock.patch.multiple(TrainingLog, __init__=begin, step=step)
    with tempfile.TemporaryDirectory() as scratch, replayed(workload, folder), watched:
        run = Path(scratch, "run")
        run_directory(workload, folder, run, settings)
        train(run, run / "training")
    clock.finish(result, metrics=metrics)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3]))
