"""Measures whether a training that samples ahead learns as well: trains recipes for several `max_staleness`, paired by
seed.

Runs the real loop, with an engine of this benchmark in its process. A virtual clock simulates the servers: the time per
token differs between groups, log-normally distributed, so that some take long. New weights arrive when the clock says
that an update is done, and sequences continue with these. So results do not depend on this machine's speed, and repeat
exactly.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.command import ROOT, python_path
from grpo_core.algorithm import losses
from grpo_core.config.files import dump_config, parse_config
from grpo_core.data.order import derive_seed
from grpo_core.planning.plan import make_plan, plan_inputs
from grpo_core.planning.sampling_ahead import choose_groups
from grpo_core.rollout.transformers_engine import TransformersEngine
from grpo_core.rollout.types import Completion, Request, Sampling, Stream
from grpo_core.training import loop, session

SPREAD = 1.0  # standard deviation of the logarithm of a group's time per token
UPDATE = 0.5  # duration of an update, as a share of the longest completion's at the median time per token
EVALUATIONS = 8  # per training
REACHED = 0.9  # share of the gain with max_staleness 0; samples until then are counted


@dataclass
class _Sequence:
    """A sequence. `versions`: of the weights that sampled each token."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    truncated: bool = False
    ended: bool = False


@dataclass
class _Begun:
    request: Request
    due: int
    start: float
    token_time: float
    sequences: list[_Sequence]

    @property
    def end(self) -> float:
        return self.start + self.token_time * max(len(sequence.ids) for sequence in self.sequences)


class VirtualServers:
    """An Engine and Lookahead in the training process. Sequences are sampled to their end when they are asked for. When
    weights arrive, the tokens that by the clock were not sampled yet are sampled again, with the new weights."""

    def __init__(self, model: nn.Module, tokenizer: Any, max_length: int, update_time: float):
        self.model, self.update_time = copy.deepcopy(model), update_time
        self.engine = TransformersEngine(self.model, tokenizer, max_length)
        self.notes = self.engine.notes
        self.now, self.version = 0.0, 0
        self.has_trained = False
        self.begun: dict[int, _Begun] = {}  # by seed

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Stream:
        self.has_trained = True
        return self.engine.generate(requests, sampling)

    def begin(self, requests: Sequence[Request], sampling: Sampling, max_staleness: int) -> None:
        for request in requests:
            if request.seed not in self.begun:
                token_time = random.Random(request.seed).lognormvariate(0.0, SPREAD)
                sequences = [_Sequence() for _ in range(request.num_completions)]
                due = self.version + max_staleness
                self.begun[request.seed] = _Begun(request, due, self.now, token_time, sequences)

    def take(self, requests: Sequence[Request], sampling: Sampling, count: int) -> Stream:
        self._sample(sampling)
        left = {number: self.begun[request.seed] for number, request in enumerate(requests)}
        finished: list[int] = []
        room = count
        for number in sorted(left, key=lambda number: left[number].end):
            if not room:
                break
            self.now = max(self.now, left[number].end)
            finished.append(number)
            due = {number: begun.due for number, begun in left.items()}
            taken = choose_groups(finished, due, self.version, room, count)
            room -= len(taken)
            for each in taken:
                finished.remove(each)
                del self.begun[requests[each].seed]
            yield [(each, [self._completion(sequence) for sequence in left.pop(each).sequences]) for each in taken]
        self.has_trained = True

    def drop_begun(self) -> None:
        self.begun.clear()

    def compute_logprobs(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        return self.engine.compute_logprobs(sequences)

    def sync_weights(self, model: nn.Module) -> str:
        self.now += self.update_time * self.has_trained
        self.has_trained = False
        for begun in self.begun.values():
            has = int((self.now - begun.start) / begun.token_time)
            for sequence in begun.sequences:
                if has < len(sequence.ids):
                    for values in (sequence.ids, sequence.logprobs, sequence.versions):
                        del values[has:]
                    sequence.ended = False
        self.model.load_state_dict(model.state_dict())
        self.version += 1
        return "copied"

    def close(self) -> None:
        pass

    def _sample(self, sampling: Sampling) -> None:
        """Sample all begun sequences to their end, with the present weights."""
        open_ones = [
            (begun, member, sequence)
            for begun in self.begun.values()
            for member, sequence in enumerate(begun.sequences)
            if not sequence.ended
        ]
        requests = [
            Request(
                begun.request.prompt_ids + sequence.ids,
                1,
                derive_seed(begun.request.seed, member, len(sequence.ids)),
                sampling.max_tokens - len(sequence.ids),
            )
            for begun, member, sequence in open_ones
        ]
        for step in self.engine.generate(requests, sampling):
            for number, (found,) in step:
                sequence = open_ones[number][2]
                sequence.ids += found.ids
                sequence.logprobs += found.logprobs
                sequence.versions += [self.version] * len(found.ids)
                sequence.truncated, sequence.ended = found.truncated, True

    def _completion(self, sequence: _Sequence) -> Completion:
        ages = [self.version - version for version in sequence.versions]
        return Completion(sequence.ids, sequence.logprobs, sequence.truncated, ages=ages)


def learn(recipes: Sequence[str], most: Sequence[int], seeds: int, updates: int | None) -> Iterator[dict[str, Any]]:
    """Yield, after each training, all trainings so far and their differences to `max_staleness` 0 with the same
    seed."""
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for recipe in recipes:
            values = tomllib.loads((ROOT / "configs" / f"{recipe}.toml").read_text())
            inputs = Path(values["data"]["train"]).parent
            make = [sys.executable, "-m", f"examples.{inputs.name}.make"]
            subprocess.run(make, check=True, env={**os.environ, "PYTHONPATH": python_path(ROOT)})
            for seed in range(seeds):
                for number in most:  # one seed after the other, so that an interrupted run has complete pairs
                    run = _make_run(Path(scratch, f"{recipe}-{seed}-{number}"), values, number, seed, updates)
                    found.append({"recipe": recipe, "seed": seed, "max_staleness": number, **_train(run)})
                    print(json.dumps(found[-1]), flush=True)
                    yield {"trainings": found, "paired": paired(found), "spread": SPREAD, "update_time": UPDATE}


def paired(trainings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare each recipe and max_staleness above 0 with max_staleness 0, by seed: difference in held-out reward, and
    samples until REACHED of the gain with max_staleness 0, as a multiple of those needed with 0."""
    by_arm = {(each["recipe"], each["seed"], each["max_staleness"]): each for each in trainings}
    found = []
    for recipe, most in dict.fromkeys((each["recipe"], each["max_staleness"]) for each in trainings):
        pairs = [
            (by_arm[recipe, seed, 0], arm)
            for (name, seed, number), arm in by_arm.items()
            if (name, number) == (recipe, most) and number and (recipe, seed, 0) in by_arm
        ]
        if not pairs:
            continue
        differences = [arm["final"] - base["final"] for base, arm in pairs]
        ratios = []
        for base, arm in pairs:
            goal = base["curve"][0][1] + REACHED * (base["final"] - base["curve"][0][1])
            needed, own = _samples_to(goal, base["curve"]), _samples_to(goal, arm["curve"])
            ratios.append(own / needed if own and needed else None)
        error = _standard_error(differences)
        found.append({"recipe": recipe, "max_staleness": most, "more_reward": differences, "standard_error": error})
        found[-1] |= {"times_the_samples": ratios, "staleness": mean(arm["staleness"] for _, arm in pairs)}
    return found


def _samples_to(goal: float, curve: Sequence[Sequence[float]]) -> float | None:
    return next((samples for samples, reward in curve if reward >= goal), None)


def _standard_error(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    center = mean(values)
    return math.sqrt(sum((value - center) ** 2 for value in values) / (len(values) - 1) / len(values))


def _make_run(run: Path, recipe: Mapping[str, Any], most: int, seed: int, updates: int | None) -> Path:
    """Make a run directory as the stages validate and plan leave it."""
    values = copy.deepcopy({key: value for key, value in recipe.items() if key not in ("promotion", "registry")})
    values["seed"] = seed
    values["rollout"] |= {"engine": "vllm-server", "max_staleness": most}
    values["train"]["max_steps"] = updates or values["train"]["max_steps"]
    values["train"] |= {"eval_steps": max(values["train"]["max_steps"] // EVALUATIONS, 1), "save_steps": 10_000}
    config = parse_config(values)
    (run / "dataset").mkdir(parents=True)
    for name in ("train", "eval"):
        shutil.copy(values["data"][name], run / "dataset" / f"{name}.parquet")
    import pyarrow.parquet as pq

    plan = make_plan(plan_inputs(config, pq.read_metadata(run / "dataset" / "train.parquet").num_rows))
    (run / "config.toml").write_text(dump_config(config))
    (run / "plan.json").write_text(json.dumps({"plan": asdict(plan)}))
    return run


def _train(run: Path) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.staleness_learning", str(run)],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    rows = [json.loads(line) for line in (run / "training" / "metrics.jsonl").read_text().splitlines()]
    per_update = json.loads((run / "plan.json").read_text())["plan"]["effective_batch_size"]
    curve = [(row["step"] * per_update, row["eval_reward"]) for row in rows if "eval_reward" in row]
    return {
        "final": curve[-1][1],
        "curve": curve,
        "staleness": mean(row.get("sampling/staleness/mean", 0.0) for row in rows),
        "oldest": max(row.get("sampling/staleness/max", 0.0) for row in rows),
        "logp_difference": mean(row["sampling/sampling_logp_difference/mean"] for row in rows),
        "effective_sample_share": json.loads((run / "effective.json").read_text()),
        "seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    """Train the given run directory with VirtualServers; write the effective share of the samples under the sampling
    correction to effective.json."""
    run, shares = Path(sys.argv[1]), list[float]()
    correct = losses.sampling_correction

    def recorded(*arguments: Any) -> torch.Tensor:
        correction = correct(*arguments)
        used = correction.expand_as(arguments[2])[arguments[2] > 0]
        if (squares := used.square().sum().item()) > 0:
            shares.append(used.sum().item() ** 2 / squares / len(used))
        return correction

    def engine(config: Any, name: str, model: nn.Module, tokenizer: Any, max_length: int) -> VirtualServers:
        return VirtualServers(model, tokenizer, max_length, UPDATE * config.rollout.max_completion_length)

    with mock.patch.object(session, "make_engine", engine), mock.patch.object(losses, "sampling_correction", recorded):
        loop.train(run, run / "training")
    (run / "effective.json").write_text(json.dumps(mean(shares)))


if __name__ == "__main__":
    main()
