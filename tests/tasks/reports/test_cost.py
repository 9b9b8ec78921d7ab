"""What a run costs: GPUs held, hours and price, and nothing where no GPU was."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_core.config.files import parse_config
from tasks.reports.cost import cost_of
from tests.made_up import values_of

RESULT = {"resumed_at_step": None, "seconds": 7200.0, "train_seconds": 5000.0, "sampled_tokens": 1_234_567}
SERVERS = {"engine": "vllm-server", "vllm_num_servers": 2, "vllm_data_parallel_size": 2}


@pytest.mark.parametrize(
    ("sections", "gpu_hours"),
    [
        ({}, (2 + 0.25) * 1 + 0.5),
        ({"train": {"num_processes": 4}}, (2 + 0.25) * 4 + 0.5),
        ({"train": {"num_processes": 4, "sharding": "full"}}, (2 + 0.25) * 4 + 0.5 * 4),
        ({"train": {"num_processes": 4}, "rollout": SERVERS}, (2 + 0.25) * (4 + 4) + 0.5 * (1 + 4)),
    ],
)
def test_gpu_hours_are_those_of_all_gpus_held_by_probe_training_and_evaluation(
    sections: dict[str, Any], gpu_hours: float
) -> None:
    config = parse_config(values_of("dear", launch={"gpu_hour_price": 2.5}, **sections))
    cost = cost_of(config, "NVIDIA H100 80GB HBM3", RESULT, 1800.0, 900.0)
    assert cost.gpu_hours == pytest.approx(gpu_hours)
    assert cost.money == pytest.approx(2.5 * gpu_hours)
    assert cost.metrics == {
        "cost/gpu_hours": cost.gpu_hours,
        "cost/money": cost.money,
        "cost/sampled_tokens": 1_234_567.0,
    }


@pytest.mark.parametrize("hardware", ["", "CPU with 2 cores"])
def test_without_a_gpu_only_tokens_are_counted(hardware: str) -> None:
    config = parse_config(values_of("free", launch={"gpu_hour_price": 2.5}))
    cost = cost_of(config, hardware, RESULT, 1800.0, 900.0)
    assert cost.metrics == {"cost/sampled_tokens": 1_234_567.0}
    assert dict(cost.rows()) == {"completion tokens sampled": "1,234,567", "GPU hours": "–"}


def test_an_interrupted_training_cost_at_least_what_is_known() -> None:
    config = parse_config(values_of("resumed", launch={"gpu_hour_price": 2.0}))
    result = {**RESULT, "resumed_at_step": 40, "seconds": 600.0, "train_seconds": 3600.0}
    cost = cost_of(config, "NVIDIA L4", result, 0.0, 0.0)
    assert dict(cost.rows()) == {
        "completion tokens sampled": "1,234,567",
        "GPU hours": "at least 1.000",
        "cost at 2 per GPU hour": "at least 2.00",
    }
