"""Runs TRL's side of a comparison in a process of its own: trains on a workload and records when each step ended.

    python -m benchmarks.side_trl FOLDER SETTINGS RESULT

SETTINGS is JSON: `precision` ("no" or "bf16"), `rows` (per_device_train_batch_size), `checkpointing`; `engine`, `seed`
and `liger` (Liger's kernels), by default "transformers", 0 and false.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.clock import Clock
from benchmarks.workload import Workload, read, reward


def configuration(workload: Workload, settings: dict[str, Any], output: str) -> Any:
    """Configuration of TRL. All other settings are TRL's defaults, such as β = 0, loss_type dapo, one update per
    rollout, fused AdamW."""
    import torch
    from trl import GRPOConfig

    rows = settings["rows"]
    return GRPOConfig(
        output_dir=output,
        use_cpu=not torch.cuda.is_available(),
        use_vllm=settings.get("engine") == "vllm",
        vllm_mode="colocate",
        bf16=settings["precision"] == "bf16",
        gradient_checkpointing=settings["checkpointing"],
        use_liger_kernel=settings.get("liger", False),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=workload.completions // rows,
        num_generations=workload.group,
        max_completion_length=workload.completion,
        max_steps=workload.steps,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        seed=settings.get("seed", 0),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,  # as ours: each step's figures are written
    )


def main(folder: Path, settings: dict[str, Any], result: Path) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    workload = read(folder)
    clock = Clock(workload.warm_up)
    metrics: list[dict[str, float]] = []

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.begin()

        def on_log(self, *_: Any, **keys: Any) -> None:
            metrics.append(keys["logs"])

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step:  # after the last step was logged
                clock.step()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            clock.step()

    class Replaying(GRPOTrainer):
        """Uses the stored completions instead of sampling."""

        stored: Any

        def _generate_single_turn(
            self, prompt_ids: list[list[int]], *_: Any, **__: Any
        ) -> tuple[list[list[int]], None]:
            groups = next(self.stored)
            of_group = [iter(group) for group in groups]
            numbers = [int(self.processing_class.decode(ids[:4])) for ids in prompt_ids]
            return [next(of_group[number]) for number in numbers], None

    with tempfile.TemporaryDirectory() as scratch:
        replay = workload.mode == "replay"
        trainer = (Replaying if replay else GRPOTrainer)(
            model=str(folder / "model"),
            reward_funcs=reward(workload),
            args=configuration(workload, settings, scratch),
            train_dataset=Dataset.from_parquet(str(folder / "prompts.parquet")),
            callbacks=[Watch()],
        )
        if replay:
            trainer.stored = iter(json.loads((folder / "completions.json").read_text()))
        trainer.train()
        clock.finish(result, metrics=metrics)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3]))
