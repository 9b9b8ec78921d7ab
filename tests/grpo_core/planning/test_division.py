"""A batch divided among another number of processes is the same batch, by the plan's own rules."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from grpo_core.planning.rules import division

SIZES = st.integers(1, 6)


@given(b=SIZES, w=SIZES, a=SIZES, s=SIZES, processes=st.integers(1, 12), most=st.integers(1, 12))
def test_the_keys_give_the_batch_and_are_missing_only_where_none_do(
    b: int, w: int, a: int, s: int, processes: int, most: int
) -> None:
    batch = {"completions_per_update": b * w * a, "completions_per_generation": b * w * s}
    keys = division(batch, processes, most)
    if keys is None:
        assert math.gcd(*batch.values()) % processes
        return
    micro_step = keys["per_device_train_batch_size"] * processes
    assert micro_step * keys["gradient_accumulation_steps"] == batch["completions_per_update"]
    assert micro_step * keys["steps_per_generation"] == batch["completions_per_generation"]


def test_a_micro_batch_that_weights_follow_from_is_kept() -> None:
    batch = {"completions_per_update": 48, "completions_per_generation": 96, "per_device_train_batch_size": 4}
    assert division(batch, 3, 16) == {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 8,
    }
    assert division(batch, 5, 16) is None
