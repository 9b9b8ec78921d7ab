"""What a training leaves to read: metrics.jsonl, health.jsonl, completions as Parquet, progress lines, result.json.

A line of metrics.jsonl has `step`, the figures and `timestamp`, seconds since 1970 when the update was done. Timestamps
rise, whatever became of the lines before: an update that is done again has a later one than when it was first done.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_core import health
from grpo_core.health import Finding
from grpo_core.progress import Progress
from grpo_core.rollout.collect import Sample
from grpo_core.rollout.engine import Rollout
from grpo_core.session import Session

SECONDS_BETWEEN_LINES = 2.0
LINE_KEYS = ("step", "timestamp")  # of metrics.jsonl, beside the figures


class Records:
    """Open for the length of a training; only the main process writes."""

    def __init__(self, session: Session, output: Path, resumed_at: int):
        self.session = session
        self.accelerator = session.accelerator
        self.output = output
        self.plan = session.plan
        self.resumed_at = resumed_at
        self.last: dict[str, float] = {}
        self.printed = 0.0
        self.newest = 0.0  # timestamp
        if not self.accelerator.is_main_process:
            return
        (output / "completions").mkdir(parents=True, exist_ok=True)
        self._open(resumed_at)
        where = f"continuing after step {resumed_at}" if resumed_at else "starting"
        size = self.plan.effective_batch_size
        print(f"training: {where}, {self.plan.max_steps} updates of {size} completions", flush=True)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of update `step` (from 1)."""
        self.last = metrics
        if not self.accelerator.is_main_process:
            return
        self.newest = round(max(time.time(), self.newest + 0.001), 3)
        self.file.write(json.dumps({"step": step, **metrics, "timestamp": self.newest}) + "\n")
        self.file.flush()
        if step == self.plan.max_steps or time.monotonic() - self.printed > SECONDS_BETWEEN_LINES:
            self.printed = time.monotonic()
            print(_line(step, self.plan.max_steps, metrics), flush=True)

    def completions(self, step: int, rollout: Rollout, samples: Sequence[Sample]) -> None:
        """Record the generation batch that was sampled for update `step`, a row a completion."""
        if not self.accelerator.is_main_process:
            return
        columns: dict[str, Any] = {
            "step": [step] * len(samples),
            "prompt": [self.session.prompts.rows[sample.row]["prompt"] for sample in samples],
            "completion": [sample.text for sample in samples],
            "advantage": rollout.advantages.tolist(),
            "prompt_tokens": [len(ids) for ids in rollout.prompt_ids],
            "completion_tokens": [len(sample.completion.ids) for sample in samples],
            "truncated": rollout.truncated.tolist(),
        }
        for position, reward in enumerate(self.session.rewards):
            values = [sample.rewards[position] for sample in samples]
            columns[f"rewards/{reward.name}"] = pa.array(values, pa.float64(), from_pandas=True)  # NaN → null: None
        pq.write_table(pa.table(columns), self.output / "completions" / f"rollout-{rollout.index:06d}.parquet")

    def finding(self, finding: Finding) -> None:
        """Record what the health policy found."""
        if self.accelerator.is_main_process:
            health.record(self.output / "health.jsonl", finding)

    def rewind(self, step: int) -> None:
        """Forget the metrics after `step`: the updates after it are done again."""
        if self.accelerator.is_main_process:
            print(f"training: back to step {step}", flush=True)
            self.file.close()
            self._open(step)

    def stop(self, progress: Progress, why: str) -> None:
        """Say why and where the training stops; who told it to may be gone, and with it who reads this."""
        if self.accelerator.is_main_process:
            self.file.close()
            with contextlib.suppress(OSError):
                saved = f"the checkpoint of step {progress.updates} is written" if progress.updates else "no step done"
                print(f"training: {why}, {saved}", flush=True)

    def finish(self, progress: Progress) -> dict[str, Any]:
        """Write result.json, last of all: its presence says that the training is complete."""
        plan, rows, recomputed = self.plan, progress.rows_per_pass, self.session.policy.recomputed
        passes = math.ceil(plan.per_device_train_batch_size / rows)
        result = {
            "counted": progress.counts,
            "planned": plan.counts(plan.max_steps),
            "stopped_early_at_step": progress.updates if progress.stopped_early else None,
            "best_step": progress.best_step,
            "best_value": None if progress.best_step is None else progress.best_value,
            "sampled_completions": progress.sampled_completions,
            "sampled_tokens": progress.sampled_tokens,
            "train_seconds": round(progress.train_seconds, 3),
            "resumed_at_step": self.resumed_at or None,
            "roll_backs": progress.roll_backs,
            "per_device_train_batch_size": rows,
            "gradient_accumulation_steps": plan.gradient_accumulation_steps * passes,
            "recomputed_layers": recomputed,
            "ran_out_of_memory": rows < plan.per_device_train_batch_size
            or (recomputed > 0 and not self.session.config.train.gradient_checkpointing),
            "metrics": self.last,
        }
        if self.accelerator.is_main_process:
            if progress.stopped_early:
                print(f"training: stopped early after step {progress.updates}, best was step {progress.best_step}")
            self.file.close()
            temporary = self.output / "result.json.tmp"
            temporary.write_text(json.dumps(result, indent=2) + "\n")
            temporary.rename(self.output / "result.json")
        return result

    def _open(self, step: int) -> None:
        """Drop the lines after `step`, to write on from there."""
        path = self.output / "metrics.jsonl"
        rows = _complete_rows(path)
        kept = [row for row in rows if row["step"] <= step]
        self.newest = max([self.newest, *(row["timestamp"] for row in rows)])
        self.last = {name: value for name, value in kept[-1].items() if name not in LINE_KEYS} if kept else {}
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
        temporary.rename(path)
        self.file = path.open("a")


def _line(step: int, max_steps: int, metrics: dict[str, float]) -> str:
    entropy = f"entropy {metrics['entropy']:.3f}" if "entropy" in metrics else "no token trained"
    return (
        f"step {step}/{max_steps}  reward {metrics['reward']:.3f}  loss {metrics['loss']:+.4f}  "
        f"grad {metrics['grad_norm']:.2f}  {entropy}  "
        f"length {metrics['completions/mean_length']:.1f}  {metrics['step_time']:.2f} s"
    )


def _complete_rows(path: Path) -> list[dict[str, float]]:
    """The lines there are, but for one that a kill cut off."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
