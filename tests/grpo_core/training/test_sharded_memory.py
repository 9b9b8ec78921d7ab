"""Memory that real processes take for a sharded training, against arithmetic; while loading, too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from benchmarks.sharding import figures
from benchmarks.side_ours import run_directory
from benchmarks.workload import Workload, write
from grpo_core.config.files import parse_config
from grpo_core.planning.passes import working_set
from grpo_core.planning.shapes import model_shape
from tests.conftest import config_values

SMALL = Workload(  # 23 million parameters
    hidden=384,
    intermediate=1536,
    layers=10,
    heads=6,
    kv_heads=6,
    vocabulary=512,
    prompts=4,
    prompt_lengths=(6, 8),
    group=4,
    completion=8,
    steps=1,
    warm_up=0,
)
LARGE = replace(SMALL, hidden=768, intermediate=3072, heads=12, kv_heads=12)  # 90 million
TOKENS = 48  # of a pass of one process: about half of what it trains
FLOAT = 4  # bytes


def _measured(workload: Workload, folder: Path, processes: int, precision: str) -> list[dict[str, Any]]:
    """Figures of each process. The model is in bfloat16, as most are published: loading makes every float32 weight."""
    write(workload, folder / "workload")
    file = folder / "workload" / "model" / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    settings = {"precision": precision, "processes": processes, "sharding": "full" if processes > 1 else "none"}
    run_directory(workload, folder / "workload", folder / "run", settings)
    return figures(folder / "workload", folder / "run", processes, 0, TOKENS // processes)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("workload", "processes", "precision"),
    [
        pytest.param(SMALL, 1, "no", id="whole"),
        pytest.param(SMALL, 2, "no", id="halves"),
        *(
            pytest.param(LARGE, processes, precision, marks=pytest.mark.e2e)
            for processes, precision in ((1, "no"), (2, "no"), (2, "bf16"), (4, "no"))
        ),
    ],
)
def test_each_process_takes_the_memory_of_its_share_and_never_loads_more(
    workload: Workload, processes: int, precision: str, tmp_path: Path
) -> None:
    """Anonymous memory, as the kernel counts it: while weights are loaded, before an update, at an update's peak."""
    measured = _measured(workload, tmp_path, processes, precision)
    values = json.loads((tmp_path / "workload" / "model" / "config.json").read_text())
    shape = model_shape(values)
    share, layer = FLOAT * shape.parameters / processes, FLOAT * shape.largest_layer
    # Per token and layer: norms and residuals, and what is computed between them.
    working = FLOAT * TOKENS / processes * shape.layers * (11 * shape.hidden + 4 * values["intermediate_size"])
    if processes > 1:
        keys = {"sharding": "full", "num_processes": processes, "mixed_precision": precision}
        config = parse_config(config_values(tmp_path, tmp_path, **keys))
        working = sum(working_set(config, shape, working, 0, 0, 0).values())
    for found in measured:
        assert found["parameters"] == shape.parameters
        assert found["loading"] <= share + layer
        assert found["held"] == pytest.approx(3 * share, rel=0.15)
        assert found["peak"] == pytest.approx(4 * share + working, rel=0.15)
