"""What events say of a run that ended, from made-up runs, for which Prefect's server is not needed; and what a run
costs: GPUs held, hours and price, and nothing where no GPU was."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.schemas.objects import State
from prefect.states import AwaitingRetry, Cancelled, Cancelling, Crashed, Failed

from grpo_core.config.files import load_config, parse_config
from tasks.reports import events
from tasks.reports.compare import comparison_page
from tasks.reports.cost import cost_of, sum_metrics, training_cost
from tasks.reports.record import read_record
from tasks.reports.report import report_page
from tasks.reports.sweep import choice_section, make_choice, read_choice
from tasks.stages import prefect_address
from tests.made_up import made_up_run, metrics_of, outcomes_of, samples_of, values_of
from tests.pages import Page

Emitted = list[tuple[str, dict[str, Any]]]
FLOW_RUN = uuid.uuid4()


@pytest.fixture
def emitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Emitted:
    """(event, payload) of what is emitted; payloads as they arrive."""
    found: Emitted = []

    def emit(event: str, resource: Any, related: Any, payload: Any) -> None:
        found.append((event, json.loads(json.dumps(payload, allow_nan=False))))

    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    monkeypatch.setattr(events, "emit_event", emit)
    monkeypatch.setattr(prefect_address, "url_for", lambda kind, run_id: f"http://prefect/{kind}/{run_id}")
    return found


def _finished(storage: Path, name: str, rate: float, **sections: Any) -> Path:
    samples = samples_of({"base": outcomes_of(0, 0.4), "trained": outcomes_of(1, rate)})
    return made_up_run(storage / "runs" / name, values_of(name, **sections), samples, metrics_of())


def _end(
    monkeypatch: pytest.MonkeyPatch,
    state: State,
    later: State | None = None,
    name: str = "sums",
    hook: Any = events.announce_end,
) -> None:
    """A run of the pipeline ends in a state; `later`: the state that Prefect's server has when it is asked."""
    known = SimpleNamespace(id=FLOW_RUN, name=name, state=later or state)

    class Client:
        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

        def read_flow_run(self, run_id: uuid.UUID) -> Any:
            return known

    monkeypatch.setattr(events, "get_client", lambda sync_client: Client())
    hook(None, known, state)


@pytest.mark.parametrize(
    ("state", "event"),
    [
        (Failed(message=f"{events.FAILURE}StageError: no data"), "grpo.run.failed"),
        (Cancelling(), "grpo.run.cancelled"),
        (Cancelled(message="train was interrupted"), "grpo.run.cancelled"),
        (Crashed(message="status -9"), "grpo.run.crashed"),
    ],
)
def test_a_run_without_a_result_says_how_it_ended_and_why(
    state: State, event: str, emitted: Emitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    _end(monkeypatch, state)
    [(name, payload)] = emitted
    reason = (state.message or "").removeprefix(events.FAILURE)
    ended = event.rpartition(".")[2]
    assert name == event
    assert payload == {
        "run": "sums",
        "ended": ended,
        "reason": reason,
        "text": f"run sums {ended}: {reason}",
        "flow_run_url": f"http://prefect/flow-run/{FLOW_RUN}",
    }


def test_a_run_that_goes_on_after_a_crash_has_not_ended(emitted: Emitted, monkeypatch: pytest.MonkeyPatch) -> None:
    _end(monkeypatch, Crashed(), later=AwaitingRetry())
    assert emitted == []


def test_a_completed_run_tells_the_figures_of_its_report(emitted: Emitted, tmp_path: Path) -> None:
    run = _finished(tmp_path, "sums", 0.9, launch={"gpu_hour_price": 2.0})
    (run / "registration.json").write_text(json.dumps({"model_name": "a b", "version": "4"}))
    (run / "training" / "mlflow.json").write_text(json.dumps({"run_id": "r", "experiment_id": "7", "hardware": "H100"}))
    events.announce_completed(run, load_config(run / "config.toml"), str(FLOW_RUN))
    [(event, payload)] = emitted
    report = json.loads((run / "evaluation" / "report.json").read_text())
    held_out = report["sets"]["held-out"]
    own, gain = held_out["policies"]["trained"]["accuracy"], held_out["differences"]["base"]["accuracy"]
    hours = 63 / 3600
    assert event == "grpo.run.completed"
    assert payload["text"].startswith("run sums completed: Better than the base by ")
    assert payload["text"].count(f"accuracy {own['mean']:.1%} [{100 * own['low']:.1f}, {100 * own['high']:.1f}]") == 1
    figures = ("value", "low", "high", "gain", "gain_low", "gain_high", "p_value")
    expected = [
        *(own[key] for key in ("mean", "low", "high")),
        *(gain[key] for key in ("mean", "low", "high", "p_value")),
    ]
    assert [payload[key] for key in figures] == expected
    assert (payload["result"], payload["metric"], payload["against"]) == ("better", "accuracy", "base")
    assert payload["gpu_hours"] == pytest.approx(hours) and payload["money"] == pytest.approx(2 * hours)
    assert payload["sampled_tokens"] == 9000
    assert (payload["model"], payload["version"]) == ("a b", "4")
    assert payload["version_url"].endswith("/#/models/a%20b/versions/4?workflowType=machine_learning")
    assert "/#/experiments/7/runs/r?" in payload["mlflow_url"]
    assert payload["report"] == str(run / "evaluation" / "report.html")


def test_a_sweep_tells_which_arm_is_chosen_or_how_it_ended(
    emitted: Emitted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, rate in (("sums.lr.a", 0.1), ("sums.lr.b", 0.2)):
        sections = {"train": {"learning_rate": rate}, "registry": {"sweep": "sums.lr"}}
        run = _finished(tmp_path, name, 0.4 + 2 * rate, **sections)
        (run / "registration.json").write_text(json.dumps({"model_name": "sums", "version": name[-1]}))
    (tmp_path / "sweeps" / "sums.lr").mkdir(parents=True)
    (tmp_path / "sweeps" / "sums.lr" / "mlflow.json").write_text(json.dumps({"run_id": "r", "experiment_id": "7"}))
    events.announce_sweep("sums.lr", str(FLOW_RUN))
    _end(monkeypatch, Failed(message="1 of 2 arms failed"), name="sums.lr", hook=events.announce_sweep_end)
    (completed, payload), (failed, reason) = emitted
    choice, _ = read_choice("sums.lr")
    assert (completed, payload["chosen"], payload["version"]) == ("grpo.sweep.completed", "sums.lr.b", "b")
    assert (payload["gain"], payload["gain_low"]) == (choice.best.gain.mean, choice.best.gain.low)
    assert payload["text"].startswith("sweep sums.lr completed: Chosen on held-out: sums.lr.b; train.learning_rate=0.2")
    assert "/#/experiments/7/runs/r?" in payload["mlflow_url"] and (payload["arms"], payload["stopped"]) == (2, 0)
    assert (failed, reason["text"]) == ("grpo.sweep.failed", "sweep sums.lr failed: 1 of 2 arms failed")


def test_a_training_tells_its_updates_and_cost_and_a_figure_that_is_not_finite_is_null(
    emitted: Emitted, tmp_path: Path
) -> None:
    run = _finished(tmp_path, "sums", 0.9)
    config = load_config(run / "config.toml")
    events.announce_training(run, config, "completed", "wrote training")
    events.announce_training(run, config, "stopped", "train was interrupted, 3 of 50 updates saved")
    events.announce("grpo.refused", "model", "sums", {"gain": float("nan")})
    assert [event for event, _ in emitted] == ["grpo.training.completed", "grpo.training.stopped", "grpo.refused"]
    assert (emitted[0][1]["updates"], emitted[0][1]["planned_updates"], emitted[0][1]["sampled_tokens"]) == (
        50,
        50,
        9000,
    )
    assert emitted[1][1]["text"] == "training of sums stopped: train was interrupted, 3 of 50 updates saved"
    assert emitted[2][1] == {"gain": None}


def test_a_page_whose_address_holds_a_password_is_not_named(monkeypatch: pytest.MonkeyPatch, emitted: Emitted) -> None:
    monkeypatch.setattr(prefect_address, "url_for", lambda kind, run_id: f"https://grpo:hidden@prefect/{kind}/{run_id}")
    _end(monkeypatch, Failed())
    _end(monkeypatch, Failed(), hook=events.announce_sweep_end)
    assert [payload["flow_run_url"] for _, payload in emitted] == ["", ""]


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
