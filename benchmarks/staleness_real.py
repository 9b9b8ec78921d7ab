"""Compares real trainings with a real vLLM server on this CPU with the simulation, which is fitted to one of them.

Each training is complete, in a process of its own, with vLLM's server in another. A random model ends each completion
with the same probability at every token, so lengths are geometric. The server's steps and the reward are slowed down by
sleeping, which takes no CPU time, so that trainer and server do not slow each other down, as on GPUs. The server's
speed is fitted to the training with `max_staleness` 0 and used for all; lengths and the trainer's seconds are those of
each training. Prefilling such a small model counts as free.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import polars as pl

from benchmarks.command import ROOT, python_path
from grpo_core.config.files import load_config
from grpo_core.planning.ahead_forecast import CPU_SLOTS, EarlierSampling, advise, fit_speed
from grpo_core.planning.plan import load_plan
from grpo_core.planning.sampling_ahead import Group, Speed, simulate
from tasks.data.forecast_inputs import earlier_sampling
from tests.conftest import config_values, make_model, make_run
from tests.serving import free_ports, policy_server

GROUP, PROMPTS = 2, 16
VOCABULARY, LONGEST = 24, 160  # tokens: completions of 24 in the mean
STEP_SECONDS = 0.08  # for which each step of the server sleeps
WARM_UP = 3  # updates
JUDGE = """
import time
def judge(completion_ids):
    time.sleep({seconds})
    return [float(len(ids) % 2) for ids in completion_ids]
"""
SLOW = """
import time
from vllm.v1.sample.logits_processor import LogitsProcessor
class Slow(LogitsProcessor):
    def __init__(self, *_):
        pass
    def apply(self, logits):
        time.sleep({seconds})
        return logits
    def is_argmax_invariant(self):
        return False
    def update_state(self, batch_update):
        pass
"""
STOPWATCH = """
import json, sys, time
from pathlib import Path
from grpo_core.rollout.vllm.server_engine import VLLMServerEngine
from grpo_core.training import loop
run, spent, real = Path(sys.argv[1]), [], VLLMServerEngine.sync_weights
def timed(*arguments):
    start = time.perf_counter()
    try:
        return real(*arguments)
    finally:
        spent.append(time.perf_counter() - start)
VLLMServerEngine.sync_weights = timed
loop.train(run, run / "training")
(run / "hand_overs.json").write_text(json.dumps(spent))
"""


def measure(most: list[int], updates: int, judge_seconds: float, servers: int, tiny: bool) -> dict[str, Any]:
    """Measure the seconds of each training, real and simulated, by `max_staleness`; 0 comes first."""
    step_seconds, longest, before = (0.0, 8, 1) if tiny else (STEP_SECONDS, LONGEST, WARM_UP)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        os.environ["PYTHONPATH"] = python_path(folder, ROOT)  # of trainings and servers
        (folder / "judges.py").write_text(JUDGE.format(seconds=judge_seconds))
        (folder / "slow.py").write_text(SLOW.format(seconds=step_seconds))
        sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "initializer_range": 0.02, "max_position_embeddings": 256}
        model = make_model(folder / "model", **sizes)
        ports = free_ports(servers)
        warm_up = _run(folder / "warm-up", max(most), model, before, longest, ports)
        runs = {number: _run(folder / f"run-{number}", number, model, updates, longest, ports) for number in most}
        for port in ports:
            log, slow = folder / f"server-{port}.log", ("--logits-processors", "slow:Slow")
            stack.enter_context(policy_server(warm_up / "config.toml", port, log, *slow))
        _train(warm_up, folder)
        for number, run in runs.items():
            _train(run, folder)
            print(f"max_staleness {number}: {_seconds(run):.1f} s for {updates} updates", flush=True)
        conditions = {"step_sleeps_seconds": step_seconds, "judge_sleeps_seconds": judge_seconds}
        return conditions | {"load_average": os.getloadavg()[0], **compare(runs, servers)}


def compare(runs: dict[int, Path], servers: int) -> dict[str, Any]:
    """Compare the trainings with their simulations, and with the forecast of `grpo plan` after the one with
    `max_staleness` 0."""
    in_turn = earlier_sampling(runs[0])
    assert isinstance(in_turn, EarlierSampling), in_turn
    advice = advise(load_config(runs[0] / "config.toml"), load_plan(runs[0] / "plan.json"), in_turn, CPU_SLOTS)
    speed = fit_speed(in_turn, CPU_SLOTS)
    return {
        "completions_per_batch": PROMPTS * GROUP,
        "servers": servers,
        "step_seconds": speed.step,
        "step_seconds_per_sequence": speed.sequence,
        "planned": {"updates_per_hour": advice["updates_per_hour"], "max_staleness": advice["max_staleness"]},
        "trainings": [_beside(run, number, speed, servers) for number, run in sorted(runs.items())],
    }


def _run(run: Path, most: int, model: Path, updates: int, longest: int, ports: list[int]) -> Path:
    keys: dict[str, Any] = {
        "engine": "vllm-server",
        "num_generations": GROUP,
        "max_completion_length": longest,
        "max_steps": updates,
    }
    keys |= {"per_device_train_batch_size": GROUP * PROMPTS, "gradient_accumulation_steps": 1, "learning_rate": 1e-5}
    keys |= {"vllm_server_timeout": 600.0, "max_staleness": most}
    values = config_values(model, run, **keys)
    values["rewards"] = [{"function": "judges:judge"}]
    values["rollout"]["vllm_server_base_urls"] = [f"http://127.0.0.1:{port}" for port in ports]
    return make_run(run, values, PROMPTS * updates)


def _train(run: Path, folder: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", STOPWATCH, str(run)], env=environment, capture_output=True, text=True)
    if done.returncode:
        logs = "".join(log.read_text()[-2000:] for log in folder.glob("server-*.log"))
        raise SystemExit(done.stdout + done.stderr + logs)


def _beside(run: Path, most: int, speed: Speed, servers: int) -> dict[str, Any]:
    """Pace of a training, and of its simulation."""
    groups, prompt_tokens, staleness = _lengths(run)
    hand_over = mean(json.loads((run / "hand_overs.json").read_text())[1:])  # without the first, at the start
    other = mean(row["step_time"] - row["time/generate"] for row in _rows(run))
    speed = replace(speed, prefill=0.0, hand_over=hand_over, update=other - hand_over, token=0.0)
    found = simulate(groups, PROMPTS, most, servers, CPU_SLOTS, speed, prompt_tokens)
    real = _seconds(run)
    return {
        "max_staleness": most,
        "updates": len(found.batches),
        "hand_over_seconds": hand_over,
        "update_seconds": other - hand_over,
        "updates_per_hour": 3600 * len(found.batches) / real,
        "simulated_updates_per_hour": found.batches_per_hour,
        "simulated_over_real_seconds": found.seconds / real,
        "mean_staleness": staleness,
        "simulated_mean_staleness": found.mean_staleness,
    }


def _rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "training" / "metrics.jsonl").read_text().splitlines()]


def _seconds(run: Path) -> float:
    return sum(row["step_time"] for row in _rows(run))


def _lengths(run: Path) -> tuple[list[Group], float, float]:
    """Return the training's groups in the order in which they began, the mean length of a prompt, and the mean number
    of hand-overs since a token was sampled."""
    by_turn: dict[int, list[Group]] = defaultdict(list)
    prompts, ages, tokens = [], 0, 0
    for index, file in enumerate(sorted((run / "training" / "completions").glob("*.parquet"))):
        table = pl.read_parquet(file).to_dicts()
        for first in range(0, len(table), GROUP):
            group = table[first : first + GROUP]
            by_turn[group[0].get("scheduled_batch", index)].append([[(row["completion_tokens"], 0.0)] for row in group])
            prompts += [row["prompt_tokens"] for row in group]
            ages += sum(sum(row.get("ages") or [0]) for row in group)
            tokens += sum(row["completion_tokens"] for row in group)
    groups = [group for turn in sorted(by_turn) for group in by_turn[turn]]
    return groups, mean(prompts), ages / tokens
