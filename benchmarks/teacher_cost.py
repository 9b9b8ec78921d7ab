"""What a teacher's pass takes of a training's CPU time, beside its share of the operations with matrices: `python -m
benchmarks.teacher_cost 512`, the teacher's width. The policy's is 256; both have four layers."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from accelerate.state import AcceleratorState
from torch.utils.flop_counter import FlopCounterMode

from grpo_core.training import loop, roll_out
from tests.conftest import config_values, make_model, make_run, with_keys

STEPS, PROMPTS = 8, 400


def make_small(folder: Path, width: int) -> Path:
    return make_model(folder, hidden_size=width, num_hidden_layers=4, intermediate_size=4 * width)


def main() -> None:
    width, folder = int(sys.argv[1]), Path(tempfile.mkdtemp())
    keys = {"max_steps": STEPS, "save_steps": 100, "per_device_train_batch_size": 128, "num_generations": 4}
    values = config_values(make_small(folder / "policy", 256), folder)
    values = with_keys(values, max_completion_length=16, beta=0.1, **keys)
    values["teacher"] = {"weight": 0.5, "model": str(make_small(folder / "teacher", width))}
    found: dict[tuple[str, bool], list[float]] = {}
    counts = False

    def measured(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keys: Any) -> Any:
            begun, counter = time.process_time(), FlopCounterMode(display=False)
            with counter if counts else nullcontext():
                result = function(*arguments, **keys)
            value = counter.get_total_flops() if counts else time.process_time() - begun
            found.setdefault((name, counts), []).append(value)
            return result

        return call

    roll_out._teacher_logprobs = measured("pass", roll_out._teacher_logprobs)
    loop.advance = measured("update", loop.advance)
    for counts in (False, True):
        run = make_run(folder / f"counts-{counts}", values, PROMPTS)
        loop.train(run, run / "training")
        AcceleratorState._reset_state(reset_partial_state=True)
    of_time, of_flops = (median(found["pass", each][2:]) / median(found["update", each][2:]) for each in (False, True))
    print(f"teacher of width {width}: {of_time:.1%} of the CPU time, {of_flops:.1%} of the FLOPs")


if __name__ == "__main__":
    main()
