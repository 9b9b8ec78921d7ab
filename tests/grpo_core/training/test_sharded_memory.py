"""Memory that real processes take for a sharded training, against arithmetic; while loading, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from benchmarks.side_ours import run_directory
from benchmarks.side_sharding import measured
from benchmarks.workload import Workload, write
from grpo_core.config.files import parse_config
from grpo_core.planning.shapes import model_shape
from grpo_core.planning.sharding import working_set
from tests.conftest import config_values
from tests.grpo_core.training.several import in_processes

WORKLOAD = Workload(
    hidden=640,
    intermediate=2560,
    layers=10,
    heads=10,
    kv_heads=10,
    vocabulary=512,
    prompts=4,
    prompt_lengths=(6, 8),
    group=4,
    completion=8,
    steps=1,
    warm_up=0,
)
TOKENS = 80  # of the batch, about
FLOAT = 4  # bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 63 million parameters, in bfloat16 as most are published: loading has to make every weight."""
    folder = tmp_path_factory.mktemp("workload") / "files"
    write(WORKLOAD, folder)
    file = folder / "model" / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return folder


def _figures(folder: Path, scratch: Path, processes: int, precision: str) -> list[dict[str, Any]]:
    """Of each process, when it has made at least two passes: the first one's gradients are held in the second."""
    settings = {"precision": precision, "processes": processes, "sharding": "full" if processes > 1 else "none"}
    run_directory(WORKLOAD, folder, scratch / "run", settings)

    def work(rank: int) -> None:
        found = measured(folder, scratch / "run", 0, TOKENS // (2 * processes))
        (scratch / f"{rank}.json").write_text(json.dumps(found))

    in_processes(processes, scratch, work)
    return [json.loads((scratch / f"{rank}.json").read_text()) for rank in range(processes)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "precision"),
    [
        (1, "no"),
        (2, "no"),
        pytest.param(4, "no", marks=pytest.mark.e2e),
        pytest.param(2, "bf16", marks=pytest.mark.e2e),
    ],
)
def test_each_process_takes_the_memory_of_its_share_and_never_loads_more(
    processes: int, precision: str, folder: Path, tmp_path: Path
) -> None:
    """Anonymous memory, as the kernel counts it, of the weights' load, between updates, and at the peak of one."""
    shape = model_shape(json.loads((folder / "model" / "config.json").read_text()))
    share = FLOAT * shape.parameters / processes
    layer = FLOAT * shape.largest_layer
    # Per token and layer: norms and residuals, and what is computed between them.
    activations = FLOAT * TOKENS / (2 * processes) * shape.layers * (11 * shape.hidden + 4 * shape.widest)
    working = activations
    if processes > 1:
        keys = {"sharding": "full", "num_processes": processes, "mixed_precision": precision}
        config = parse_config(config_values(tmp_path, tmp_path, **keys))
        working = sum(working_set(config, shape, activations, 0, 0).values())
    for found in _figures(folder, tmp_path, processes, precision):
        print(processes, precision, {k: v if isinstance(v, (list, dict)) else v / 2**20 for k, v in found.items()}, share / 2**20, (4*share+working)/2**20, working/2**20)
        assert found["parameters"] == shape.parameters
        assert found["loading"] <= share + layer
        assert found["held"] == pytest.approx(3 * share, rel=0.15)
        assert found["peak"] == pytest.approx(4 * share + working, rel=0.15)
