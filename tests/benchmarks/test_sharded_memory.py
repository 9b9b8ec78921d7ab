"""The memory of a sharded update, simulated in small: the forecast and AdamW's state."""

from __future__ import annotations

import pytest

from benchmarks.sharded_memory import forecast, simulated
from grpo_core.planning.shapes import model_shape
from tests.qwen import QWEN

PROCESSES = 8
FLOAT = 4  # bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recomputed", "offload"),
    [(False, "none"), (True, "none"), (True, "optimizer")],
    ids=["kept", "recomputed", "moments elsewhere"],
)
def test_an_update_of_7b_takes_what_is_forecast(recomputed: bool, offload: str) -> None:
    """The layers of Qwen2.5-7B, four of them, on eight processes: never less, and at most a tenth more."""
    model = {**QWEN["7B"], "num_hidden_layers": 4}
    found = simulated(model, PROCESSES, recomputed=recomputed, offload=offload)
    expected = forecast(model, PROCESSES, recomputed=recomputed, offload=offload)
    assert found["Total"] <= expected <= 1.1 * found["Total"]
    share = FLOAT * model_shape(model).parameters / PROCESSES
    sizes = {"Sharded Param": share, "Sharded Grad": share, "OptState": 2 * share * (offload == "none")}
    assert {kind: found[kind] for kind in sizes} == pytest.approx(sizes, rel=1e-3, abs=1e4)
