"""What a training leaves to read: metrics.jsonl, completions as Parquet, progress lines, result.json.

metrics.jsonl is the source; a tracker gets the same figures live.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from accelerate import Accelerator

from grpo_core.checkpoint import Progress
from grpo_core.data import Prompts
from grpo_core.plan import Plan
from grpo_core.rollout.collect import Sample
from grpo_core.rollout.engine import Rollout

SECONDS_BETWEEN_LINES = 2.0


class Records:
    """Open for the length of a training; only the main process writes."""

    def __init__(self, accelerator: Accelerator, output: Path, plan: Plan, resumed_at: int, project: str):
        self.accelerator = accelerator
        self.output = output
        self.plan = plan
        self.resumed_at = resumed_at
        self.last: dict[str, float] = {}
        self.printed = 0.0
        accelerator.init_trackers(project)
        if not accelerator.is_main_process:
            return
        (output / "completions").mkdir(parents=True, exist_ok=True)
        _keep_until(output / "metrics.jsonl", resumed_at)
        self.file = (output / "metrics.jsonl").open("a")
        where = f"continuing after step {resumed_at}" if resumed_at else "starting"
        print(f"training: {where}, {plan.max_steps} updates of {plan.effective_batch_size} completions", flush=True)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Record the metrics of update `step` (from 1)."""
        self.last = metrics
        self.accelerator.log(metrics, step=step)
        if not self.accelerator.is_main_process:
            return
        self.file.write(json.dumps({"step": step, **metrics}) + "\n")
        self.file.flush()
        if step == self.plan.max_steps or time.monotonic() - self.printed > SECONDS_BETWEEN_LINES:
            self.printed = time.monotonic()
            print(_line(step, self.plan.max_steps, metrics), flush=True)

    def completions(
        self, rollout: Rollout, samples: Sequence[Sample], prompts: Prompts, rewards: Sequence[str]
    ) -> None:
        """Record a generation batch, a row a completion."""
        if not self.accelerator.is_main_process:
            return
        columns: dict[str, Any] = {
            "prompt": [prompts.rows[sample.row]["prompt"] for sample in samples],
            "completion": [sample.text for sample in samples],
            "advantage": rollout.advantages.tolist(),
            "completion_tokens": [len(sample.completion.ids) for sample in samples],
        }
        for position, name in enumerate(rewards):
            columns[f"rewards/{name}"] = [sample.rewards[position] for sample in samples]
        pq.write_table(pa.table(columns), self.output / "completions" / f"rollout-{rollout.index:06d}.parquet")

    def finish(self, progress: Progress) -> dict[str, Any]:
        """Write result.json, last of all: its presence says that the training is complete."""
        result = {
            "updates": progress.updates,
            "planned_updates": self.plan.max_steps,
            "rollouts": progress.rollouts,
            "planned_rollouts": self.plan.rollouts,
            "completions": progress.rollouts * self.plan.generation_batch_size,
            "completion_tokens": progress.completion_tokens,
            "train_seconds": round(progress.train_seconds, 3),
            "resumed_at_step": self.resumed_at or None,
            "metrics": self.last,
        }
        if self.accelerator.is_main_process:
            self.file.close()
            temporary = self.output / "result.json.tmp"
            temporary.write_text(json.dumps(result, indent=2) + "\n")
            temporary.rename(self.output / "result.json")
        return result


def _line(step: int, max_steps: int, metrics: dict[str, float]) -> str:
    return (
        f"step {step}/{max_steps}  reward {metrics['reward']:.3f}  loss {metrics['loss']:+.4f}  "
        f"grad {metrics['grad_norm']:.2f}  entropy {metrics['entropy']:.3f}  "
        f"length {metrics['completions/mean_length']:.1f}  {metrics['step_time']:.2f} s"
    )


def _keep_until(path: Path, step: int) -> None:
    """Drop the lines after `step`: the steps that a killed run did after its last checkpoint are done again."""
    if not path.exists():
        return
    complete = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(line for line in complete if json.loads(line)["step"] <= step))
    temporary.rename(path)
