"""Files that a training writes: metrics.jsonl, health.jsonl, completions as Parquet, result.json; and progress lines,
which also name a process that the others wait for again and again.

A line of metrics.jsonl has `step`, the figures and `timestamp`, seconds since 1970 when the update was done. Timestamps
always rise: an update that is done again has a later one than before.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grpo_core import run_files
from grpo_core.data.curriculum import write_rates
from grpo_core.data.prompts import rows_at
from grpo_core.data.recording import FILE, facts, write_batch
from grpo_core.rollout.batch_metrics import PHASES
from grpo_core.rollout.collect import Sample
from grpo_core.rollout.records import conversation_columns, logged_columns, token_columns
from grpo_core.rollout.types import Rollout
from grpo_core.system.files import naming, publish
from grpo_core.system.progress import rank_name
from grpo_core.training.health import Finding
from grpo_core.training.session import Session
from grpo_core.training.state import TrainingState

SECONDS_BETWEEN_LINES = 2.0
LINE_KEYS = ("step", "timestamp")  # of metrics.jsonl, beside the figures
LAG_BATCHES = 5  # generation batches in a row in which a straggler lags
LAG_SHARE = 0.1  # of an update's time that the others wait for it


class TrainingLog:
    """Log of a training, open as long as it runs; only the main process writes."""

    def __init__(self, session: Session, output: Path, state: TrainingState):
        self.session = session
        self.accelerator = session.accelerator
        self.output = output
        self.plan = session.plan
        self.resumed_at = state.updates
        self.last: dict[str, float] = {}
        self.lost: list[int] = []  # steps whose lines of metrics.jsonl cannot be read
        self.printed = 0.0
        self.stragglers = Stragglers()
        self.newest = 0.0  # timestamp
        if not self.accelerator.is_main_process:
            return
        self.facts = facts(session.config, session.plan, session.scoring.tokenizer)
        (output / run_files.COMPLETIONS).mkdir(parents=True, exist_ok=True)
        self._open(state)
        where = f"continuing after step {self.resumed_at}" if self.resumed_at else "starting"
        size = self.plan.effective_batch_size
        print(f"training: {where}, {self.plan.max_steps} updates of {size} completions", flush=True)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of update `step` (from 1). They are on the disk before a checkpoint of it is written."""
        self.last = metrics
        if not self.accelerator.is_main_process:
            return
        self.newest = round(max(time.time(), self.newest + 0.001), 3)
        with naming(self.output / run_files.METRICS):
            self.file.write(json.dumps({"step": step, **metrics, "timestamp": self.newest}) + "\n")
            self.file.flush()
            os.fsync(self.file.fileno())
        if step == self.plan.max_steps or time.monotonic() - self.printed > SECONDS_BETWEEN_LINES:
            self.printed = time.monotonic()
            print(_line(step, self.plan.max_steps, metrics), flush=True)
        for line in self.stragglers.note(metrics):
            print(line, flush=True)

    def completions(self, step: int, rollout: Rollout, samples: Sequence[Sample]) -> None:
        """Record the generation batch that was sampled for update `step`, one row per completion.

        If it is sampled again after a roll-back to a place between its updates, the file has the rows of both times:
        `step` says for which updates.
        """
        if not self.accelerator.is_main_process:
            return
        held = [sample.said for sample in samples if sample.said]
        setting = self.session.scoring.setting
        if setting and rollout.index == 0 and (warning := setting.unread_calls(held)):
            print(f"training: {warning}", flush=True)
        rows = rows_at(self.session.prompts.rows, [sample.row for sample in samples])
        columns: dict[str, Any] = {
            "step": [step] * len(samples),
            "prompt": [row["prompt"] for row in rows],
            "completion": [sample.text for sample in samples],
            "advantage": rollout.advantages.tolist(),
            "prompt_tokens": [len(ids) for ids in rollout.prompt_ids],
            "completion_tokens": [sample.completion.sampled_tokens for sample in samples],
            "truncated": rollout.truncated.tolist(),
        }
        if self.plan.sources:
            columns["source"] = [row["source"] for row in rows]
        if self.session.prompts.images:
            columns["images"] = pa.array([row["images"] for row in rows], pa.list_(pa.int64()))
        if self.session.sampler and self.session.sampler.lookahead:
            columns["scheduled_batch"] = [sample.turn for sample in samples]
            columns["ages"] = pa.array([sample.completion.ages for sample in samples], pa.list_(pa.int64()))
        config = self.session.config
        name, logprobs = config.teacher.recorded_as, rollout.teacher_logprobs
        taught = {name: logprobs} if name and logprobs is not None else {}
        columns |= token_columns(samples, with_routes=config.algorithm.routing_replay, taught=taught)
        columns |= conversation_columns(samples)
        for position, reward in enumerate(self.session.config.rewards):
            values = [sample.rewards[position] for sample in samples]
            columns[f"rewards/{reward.name}"] = pa.array(values, pa.float64(), from_pandas=True)  # NaN → null: None
        columns |= {name: pa.array(texts, pa.string()) for name, texts in logged_columns(samples).items()}
        table, path = pa.table(columns), self._completions(rollout.index)
        if path.exists():
            earlier = pq.read_table(path)
            # A reward may have logged other columns then.
            table = pa.concat_tables([earlier.filter(pc.field("step") < step), table], promote_options="default")
        temporary = path.with_suffix(".tmp")
        with naming(temporary):
            write_batch(table, self.facts, temporary)
        publish(temporary, path)

    def pass_rates(self, state: TrainingState) -> None:
        """Write the pass rates of the completions sampled until now."""
        if self.accelerator.is_main_process and state.rates is not None:
            write_rates(state.rates, self.output / run_files.PASS_RATES)

    def finding(self, finding: Finding) -> None:
        """Record and print what the health policy found."""
        if self.accelerator.is_main_process:
            with (self.output / run_files.FINDINGS).open("a") as file:
                file.write(json.dumps(vars(finding)) + "\n")
            print(f"health: {finding.message} [{finding.action.replace('_', ' ')}]", flush=True)

    def rewind(self, state: TrainingState) -> None:
        """Drop what was logged after `state`: those updates are done again."""
        if self.accelerator.is_main_process:
            print(f"training: back to step {state.updates}", flush=True)
            self.file.close()
            self._open(state)

    def stop(self, state: TrainingState, why: str) -> None:
        """Print why and where the training stops. The process that reads the output may be gone."""
        if self.accelerator.is_main_process:
            self.file.close()
            with contextlib.suppress(OSError):
                saved = f"the checkpoint of step {state.updates} is written" if state.updates else "no step done"
                print(f"training: {why}, {saved}", flush=True)

    def finish(self, state: TrainingState) -> dict[str, Any]:
        """Write result.json, last of all: its presence says that the training is complete."""
        plan, recomputed = self.plan, self.session.policy.recomputed
        result = {
            "counted": state.counts,
            "planned": plan.counts(plan.max_steps),
            "stopped_early_at_step": state.updates if state.stopped_early else None,
            "best_step": state.best_step,
            "best_value": None if state.best_step is None else state.best_value,
            "sampled_completions": state.sampled_completions,
            "sampled_tokens": state.sampled_tokens,
            "train_seconds": round(state.train_seconds, 3),
            "resumed_at_step": self.resumed_at or None,
            "roll_backs": state.roll_backs,
            "max_staleness": state.max_staleness,
            "tokens_per_pass": self.session.memory.tokens,
            "recomputed_layers": recomputed,
            "weights_reached_engine": self.session.sampler.probe.handover if self.session.sampler else "",
            "ran_out_of_memory": self.session.memory.reduced is not None
            or (recomputed > 0 and not self.session.config.train.gradient_checkpointing),
            "metrics": self.last,
            "steps_without_metrics": self.lost,
        }
        if self.accelerator.is_main_process:
            if state.stopped_early:
                print(f"training: stopped early after step {state.updates}, best was step {state.best_step}")
            self.file.close()
            path = self.output / run_files.RESULT
            temporary = path.with_suffix(".tmp")
            temporary.write_text(json.dumps(result, indent=2) + "\n")
            publish(temporary, path)
        return result

    def _open(self, state: TrainingState) -> None:
        """Drop the lines and the generation batches of updates after `state`, and go on writing from there."""
        path, step = self.output / run_files.METRICS, state.recorded
        rows = _readable_rows(path)
        kept = [row for row in rows if row["step"] <= step]
        self.lost = sorted({*range(1, step + 1)} - {int(row["step"]) for row in kept})
        if self.lost:
            warnings.warn(
                f"{path} has lost the lines of steps {self.lost}: training goes on, their figures are gone",
                stacklevel=2,
            )
        self.newest = max([self.newest, *(row["timestamp"] for row in rows)])
        self.last = {name: value for name, value in kept[-1].items() if name not in LINE_KEYS} if kept else {}
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
        publish(temporary, path)
        self.file = path.open("a")
        trained = {self._completions(index) for index in range(self.plan.counts(state.updates)["rollouts"])}
        for abandoned in {*(self.output / run_files.COMPLETIONS).iterdir()} - trained:
            abandoned.unlink()
        self.pass_rates(state)

    def _completions(self, index: int) -> Path:
        return self.output / run_files.COMPLETIONS / FILE.format(index)


def _line(step: int, max_steps: int, metrics: dict[str, float]) -> str:
    reward = f"reward {metrics['reward']:.3f}  " if "reward" in metrics else "no reward applies  "
    if "frac_unscored" not in metrics:  # a warm start has no rewards
        reward = ""
    entropy = f"entropy {metrics['entropy']:.3f}" if "entropy" in metrics else "no token trained"
    return (
        f"step {step}/{max_steps}  {reward}loss {metrics['loss']:+.4f}  "
        f"grad {metrics['grad_norm']:.2f}  {entropy}  "
        f"length {metrics['completions/mean_length']:.1f}  {metrics['step_time']:.2f} s"
    )


def _readable_rows(path: Path) -> list[dict[str, float]]:
    """Return the lines that are whole. A kill may cut the last one off, and a power cut put zeros in place of some."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            row = json.loads(line.strip(b"\0"))
        except ValueError:
            continue
        if isinstance(row, dict) and row.keys() >= {*LINE_KEYS}:
            rows.append(row)
    return rows


@dataclass
class Stragglers:
    """Find processes that cost more than LAG_SHARE of the time in LAG_BATCHES generation batches in a row, in one
    phase."""

    streaks: dict[str, tuple[int | None, int]] = field(default_factory=dict)
    named: dict[str, int | None] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=dict)

    def note(self, metrics: Mapping[str, float]) -> list[str]:
        """Return sentences on what changes with these metrics of an update. Updates that read the same generation batch
        as the one before have its figures again, and count once."""
        said = []
        for phase in PHASES:
            lost = metrics.get(f"time/{phase}/lost")
            if lost is None or lost == self.lost.get(phase):
                continue
            self.lost[phase] = lost
            rank = int(metrics[f"time/{phase}/slowest_rank"]) if lost > LAG_SHARE * metrics["step_time"] else None
            former, length = self.streaks.get(phase, (None, 0))
            length = length + 1 if rank == former else 1
            self.streaks[phase] = rank, length
            if length == LAG_BATCHES and rank != (before := self.named.get(phase)):
                self.named[phase] = rank
                if rank is None:
                    said.append(f"straggler: {rank_name(before or 0)} is no longer slower than the others in {phase}")
                else:
                    said.append(
                        f"straggler: {rank_name(rank)} is slower than the others in {phase}, {LAG_BATCHES} times in a "
                        f"row: they wait {lost:.2g} s of {metrics['step_time']:.2g} s for it"
                    )
        return said
