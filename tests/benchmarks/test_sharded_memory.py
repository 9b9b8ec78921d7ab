"""The memory of a sharded update, simulated in small, and the page's figures of the full size."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sharded_memory import GPUS, MODELS, forecast, simulated
from grpo_core.planning.memory import GIB
from grpo_core.planning.shapes import model_shape
from tests.qwen import QWEN

PAGE = Path(__file__).parents[2] / "benchmarks" / "README.md"
PROCESSES = 8
FLOAT = 4  # bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recomputed", "offload"),
    [
        pytest.param(False, "none", marks=pytest.mark.e2e),
        pytest.param(True, "none", marks=pytest.mark.e2e),
        (True, "optimizer"),
    ],
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


def _table(first: str) -> dict[tuple[str, int], list[str]]:
    """Rows of the page's table whose heading begins so: size and number of GPUs, and the figures in GiB."""
    _, _, rest = PAGE.read_text().partition(f"{first} |")
    lines = rest.split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {(size, int(gpus)): figures for size, gpus, *figures in cells}


@pytest.mark.parametrize(
    ("table", "numbers", "kinds"),
    [
        ("| Qwen2.5 | GPUs | simulated | estimated", GPUS, [(False, "none"), (True, "none")]),
        ("| Qwen2.5 | GPUs | simulated, recomputing and offloaded", (8,), [(True, "optimizer")]),
    ],
    ids=["all on the GPU", "moments elsewhere"],
)
def test_the_page_s_simulations_are_at_most_a_tenth_below_the_forecast_and_never_above(
    table: str, numbers: tuple[int, ...], kinds: list[tuple[bool, str]]
) -> None:
    rows = _table(table)
    assert [*rows] == [(size, number) for size in MODELS for number in numbers]
    for (size, number), figures in rows.items():
        for place, (recomputed, offload) in enumerate(kinds):
            found, estimated = figures[2 * place : 2 * place + 2]
            expected = forecast(QWEN[size], number, recomputed=recomputed, offload=offload) / GIB
            assert estimated == f"{expected:.1f}", (size, number)
            assert float(found) <= float(estimated) <= 1.1 * float(found), (size, number)
