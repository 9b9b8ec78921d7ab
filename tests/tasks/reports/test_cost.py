"""What a run costs: GPUs held, hours and price, and nothing where no GPU was."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_core.config.files import parse_config
from tasks.reports.compare import comparison_page
from tasks.reports.cost import cost_of, sum_metrics, training_cost
from tasks.reports.record import read_record
from tasks.reports.report import report_page
from tasks.reports.sweep import choice_section, make_choice
from tests.made_up import made_up_run, metrics_of, outcomes_of, samples_of, values_of
from tests.pages import Page

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


def test_a_training_that_has_not_finished_cost_at_least_its_updates(tmp_path: Path) -> None:
    config = parse_config(values_of("stopped", launch={"gpu_hour_price": 2.0}))
    folder = tmp_path / "training.partial"
    assert training_cost(folder, config).gpu_hours is None, "nothing has begun"
    folder.mkdir()
    (folder / "mlflow.json").write_text(json.dumps({"hardware": "NVIDIA L4"}))
    (folder / "metrics.jsonl").write_text(
        "".join(f'{{"step": {n}, "step_time": 900.0}}\n' for n in range(1, 5)) + '{"step": 5, "st'
    )
    cost = training_cost(folder, config)
    assert cost.metrics == {"cost/gpu_hours": 1.0, "cost/money": 2.0}
    assert dict(cost.rows()) == {
        "completion tokens sampled": "–",
        "GPU hours": "at least 1.000",
        "cost at 2 per GPU hour": "at least 2.00",
    }
    finished = cost_of(config, "NVIDIA L4", RESULT, 0.0, 0.0)
    assert sum_metrics([finished, cost]) == {"cost/gpu_hours": 3.0, "cost/money": 6.0}


def test_an_interrupted_training_cost_at_least_what_is_known() -> None:
    config = parse_config(values_of("resumed", launch={"gpu_hour_price": 2.0}))
    result = {**RESULT, "resumed_at_step": 40, "seconds": 600.0, "train_seconds": 3600.0}
    cost = cost_of(config, "NVIDIA L4", result, 0.0, 0.0)
    assert dict(cost.rows()) == {
        "completion tokens sampled": "1,234,567",
        "GPU hours": "at least 1.000",
        "cost at 2 per GPU hour": "at least 2.00",
    }


@pytest.mark.slow
def test_a_price_is_in_report_comparison_and_sweep(tmp_path: Path) -> None:
    """Two hours of training and a quarter of evaluation on one GPU, at 2 per hour."""
    records = {}
    for rate in (0.1, 0.2):
        name = f"sums.sweep.rate-{rate}"
        launch, registry = {"gpu_hour_price": 2.0}, {"sweep": "sums.sweep"}
        values = values_of(name, train={"learning_rate": rate}, launch=launch, registry=registry)
        samples = samples_of({"base": outcomes_of(0, 0.3), "trained": outcomes_of(1, 0.2 + rate)})
        record = read_record(made_up_run(tmp_path / name, values, samples, metrics_of()))
        result = {**record.result, "seconds": 7200.0}
        evaluation = {**record.evaluation, "seconds": 900.0}
        records[name] = replace(record, result=result, evaluation=evaluation, hardware="NVIDIA L4", seconds={})
    record = records["sums.sweep.rate-0.1"]
    assert (record.cost.gpu_hours, record.cost.money) == (2.25, 4.5)
    report = Page(report_page(record, 900.0, {}, "", "")).text
    for text in (report, Page(comparison_page(records)).text):
        assert "cost at 2 per GPU hour" in text and "4.50" in text
    choice = make_choice(records)
    [shown] = choice_section(choice, records).tables
    assert [*shown.head] == ["setting", "accuracy", "over the base", "may be the best", "GPU hours", "cost"]
    assert all([*row[-2:]] == ["2.250", "4.500"] for row in shown.rows)
    total = sum_metrics(it.cost for it in records.values())
    assert (total["cost/gpu_hours"], total["cost/money"]) == (4.5, 9.0)
    free = {name: replace(it, hardware="CPU with 2 cores") for name, it in records.items()}
    assert [*choice_section(choice, free).tables[0].head] == ["setting", "accuracy", "over the base", "may be the best"]
    assert [*sum_metrics(it.cost for it in free.values())] == ["cost/sampled_tokens"]
