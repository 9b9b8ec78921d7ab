"""One batch, divided among a number of processes."""

from __future__ import annotations

import math
from collections.abc import Mapping


def division(batch: Mapping[str, int], num_processes: int, max_rows: int) -> dict[str, int] | None:
    """Keys of `train` under which that many processes have this batch; None if there are none.

    `batch`: `fingerprint.batch_of` a configuration. `max_rows`: completions per process and micro-step,
    kept if possible.
    """
    update, generation = batch["completions_per_update"], batch["completions_per_generation"]
    each, rest = divmod(math.gcd(update, generation), num_processes)
    sizes = [b for b in range(1, each + 1) if each % b == 0 and b == batch.get("per_device_train_batch_size", b)]
    if rest or not sizes:
        return None
    b = max((b for b in sizes if b <= max_rows), default=min(sizes))
    return {
        "per_device_train_batch_size": b,
        "gradient_accumulation_steps": update // (b * num_processes),
        "steps_per_generation": generation // (b * num_processes),
    }
