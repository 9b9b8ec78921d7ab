"""The tables of docs/how-to/scale.md, gpus.md and first-gpu-run.md are what the forecast says today."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_core.config.files import load_config, parse_config
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from grpo_core.planning.forecast import communication
from grpo_core.planning.hardware import Gpu, named_gpu
from grpo_core.planning.memory import GIB, check_engine_memory, moments, peak_memory, usable_gib
from grpo_core.planning.passes import passes_per_update
from grpo_core.planning.shapes import PromptLengths
from grpo_core.planning.tokens_per_pass import choose_tokens
from tests.conftest import config_values
from tests.qwen import planned, with_tokens

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "scale.md"
GPU, LENGTHS = named_gpu("H100"), PromptLengths(256, 256, "given")
MODELS = ("7B", "14B", "32B", "72B")
COMPLETIONS, PER_PASS = 256, 4
SETTINGS = {"per_device_train_batch_size": 64, "gradient_accumulation_steps": 4, "gradient_checkpointing": False}


def _config(processes: int, keys: dict[str, Any]) -> RunConfig:
    values = {"sharding": "full" if processes > 1 else "none", "num_processes": processes, "mixed_precision": "bf16"}
    values |= {"per_device_train_batch_size": PER_PASS, "num_generations": 8, "max_completion_length": 512}
    values |= {"gradient_accumulation_steps": COMPLETIONS // (PER_PASS * processes), "gradient_checkpointing": True}
    values |= {"engine": "vllm", "vllm_tensor_parallel_size": min(processes, 8)}
    return parse_config(config_values(Path("model"), Path("data"), **(values | keys)))


def _cell(size: str, processes: int, keys: dict[str, Any]) -> str:
    """GiB per GPU of 80 GB and whether that fits: 256 completions of 512 tokens after prompts of 256, 4 per pass."""
    run = planned(_config(processes, keys), size, LENGTHS, GPU)
    try:
        check_engine_memory(run)
    except ConfigError:
        return "no"
    peak, usable = peak_memory(with_tokens(run, choose_tokens(run)))["peak_memory_gib"], usable_gib(GPU)
    whole = GPU.memory_gib
    assert whole and usable
    verdict = "fits" if peak <= usable else "tight" if peak <= whole else "no"
    return f"{peak:.0f} {verdict}" if verdict != "fits" else f"**{peak:.0f}** fits"


@pytest.mark.parametrize(
    ("keys", "numbers"),
    [
        ({}, (8, 16, 32, 64)),
        ({"offload": "optimizer"}, (8, 16, 32, 64)),
        ({"use_peft": True, "gpu_memory_utilization": 0.5}, (1, 2, 4, 8)),
    ],
    ids=["all weights", "moments in the host's memory", "LoRA"],
)
def test_the_tables_of_what_fits_are_the_forecast_s(keys: dict[str, Any], numbers: tuple[int, ...]) -> None:
    table = [
        "| Qwen2.5 | " + " | ".join(f"{number} GPU{'s' * (number > 1)}" for number in numbers) + " |",
        "|---" * (len(numbers) + 1) + "|",
        *(f"| {size} | " + " | ".join(_cell(size, number, keys) for number in numbers) + " |" for size in MODELS),
    ]
    assert "\n".join(table) in PAGE.read_text(), "put this table into the page:\n" + "\n".join(table)


AS_ADAPTER = ["model.use_peft=true", "train.gradient_checkpointing=true", "train.learning_rate=1e-5"]


def _first_run_cell(size: str, gpu: Gpu) -> str:
    """GiB of configs/gsm8k.toml with this model, else as an adapter's training, else "no"."""
    for overrides, said in (([], ""), (AS_ADAPTER, " as adapter")):
        bf16 = "train.mixed_precision=bf16"  # what "auto" is on each of these
        config = load_config(PAGE.parents[2] / "configs" / "gsm8k.toml", [*overrides, bf16])
        run = planned(config, size, PromptLengths(150, 150, "given"), gpu)
        try:
            check_engine_memory(run)
        except ConfigError:
            continue
        found = peak_memory(with_tokens(run, choose_tokens(run)))
        if "warning" not in found:
            return f"{found['peak_memory_gib']:.0f}{said}"
    return "no"


def test_the_table_of_the_first_run_on_a_gpu_is_the_forecast_s() -> None:
    kinds = {
        "H100, or A100 of 80 GB": "H100",
        "L40S": "L40S",
        "A100 40GB": "A100 40GB",
        "RTX 4090": "RTX 4090",
        "L4 or A10G": "L4",
    }
    rows = [
        f"| {said} | " + " | ".join(_first_run_cell(size, named_gpu(name)) for size in ("0.5B", "1.5B", "3B")) + " |"
        for said, name in kinds.items()
    ]
    page = (PAGE.parent / "first-gpu-run.md").read_text()
    assert "\n".join(rows) in page, "put these rows into the page:\n" + "\n".join(rows)
    assert all(f"--set {override}" in " ".join(page.split()) for override in AS_ADAPTER)


def _tokens_cell(size: str, keys: dict[str, Any]) -> str:
    """GiB of one GPU, and tokens of a pass; 64 of 256 completions per micro-step."""
    run = planned(_config(1, SETTINGS | keys), size, LENGTHS, GPU)
    tokens = choose_tokens(run)
    found = peak_memory(with_tokens(run, tokens))
    return "no" if "warning" in found else f"{found['peak_memory_gib']:.0f}, {tokens:,}"


def test_the_table_of_one_gpu_is_the_forecast_s() -> None:
    again, lora = {"gradient_checkpointing": True}, {"use_peft": True}
    rows = [
        f"| Qwen2.5-{size} | " + " | ".join(_tokens_cell(size, keys) for keys in ({}, again, lora, lora | again)) + " |"
        for size in ("0.5B", "1.5B", "3B", "7B")
    ]
    table = "\n".join(["|---|---|---|---|---|", *rows])
    assert table in (PAGE.parent / "gpus.md").read_text(), f"put these rows into the page:\n{table}"


def test_the_page_s_example_of_offloading_is_the_forecast_s() -> None:
    page = " ".join(PAGE.read_text().split())
    for size in ("7B", "32B"):
        runs = [planned(_config(8, {"offload": offload}), size, LENGTHS, GPU) for offload in ("optimizer", "none")]
        longer, plain = (communication(run, 8)["seconds_per_update"] for run in runs)
        each = moments(runs[0]) / GIB
        said = f"{size} on 8 GPUs: {each:.1f} GiB less per GPU, {8 * each:.0f} GiB of the machine's memory, "
        assert f"{said}{longer - plain:.1f} s more per update" in page


def test_the_page_s_example_of_communication_is_the_forecast_s() -> None:
    run = planned(_config(8, {}), "7B", LENGTHS, GPU)
    found = communication(run, passes_per_update(run.config, run.plan, LENGTHS, 256, 512))
    parts, page = found["parts_gib"], " ".join(PAGE.read_text().split())
    said = f"{parts['gathered']:.0f} GiB gathered and {parts['reduced']:.0f} GiB reduced per process and update"
    assert f"{said}, {found['seconds_per_update']:.1f} s at an assumed 300 GB/s per GPU" in page
