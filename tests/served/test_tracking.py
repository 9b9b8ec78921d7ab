"""The pipeline with a tracking server that is killed under it: training goes on, and nothing is missing in the end."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow import MlflowClient

from benchmarks.command import python_path
from grpo_core.config.base import flatten
from grpo_core.config.files import load_config
from grpo_core.system.tables import read_parquet
from tests.conftest import small_quickstart
from tests.e2e.holding import FUNCTION, write_held
from tests.e2e.traced import assert_traced
from tests.processes import wait_for
from tests.serving import free_ports, kill_group, mlflow_server

pytestmark = pytest.mark.e2e

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.toml"
UPDATES = 6


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_held(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def port(inputs: Path, storage: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Address of the tracking server that the pipeline is told of."""
    [port] = free_ports(1)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("PYTHONPATH", python_path(inputs, Path(__file__).parents[2]))
    monkeypatch.syspath_prepend(inputs)
    yield port
    for name in ("hold", "waiting"):
        (inputs / name).unlink(missing_ok=True)
    mlflow.set_tracking_uri(None)


def _run(inputs: Path, name: str, *overrides: str) -> Path:
    from flows.parameters.form import changes_from_overrides
    from flows.pipeline import pipeline

    changes = flatten(
        small_quickstart(name, inputs, {"max_steps": UPDATES}, registry={"model_name": "held", "served_prompts": 0})
    )
    values = [f"{key}={value}" for key, value in changes.items()]
    values += [f'rewards=[{{function="{FUNCTION}"}}]', *overrides]
    return pipeline("quickstart", changes_from_overrides(CONFIG, values))


def _until_waiting(inputs: Path, rollout: int) -> None:
    waiting = inputs / "waiting"
    wait_for(lambda: waiting.exists() and waiting.read_text() == str(rollout))


def _figures(run: Path) -> dict[str, list[tuple[int, float]]]:
    rows = [json.loads(line) for line in (run / "training" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, UPDATES + 1))
    names = {name: None for row in rows for name in row if name not in ("step", "timestamp")}
    return {name: [(row["step"], row[name]) for row in rows if name in row] for name in names}


def _tracked(run: Path) -> tuple[Any, dict[str, list[tuple[int, float]]]]:
    """The MLflow run, and what it has of the figures of metrics.jsonl."""
    client, run_id = MlflowClient(), json.loads((run / "registration.json").read_text())["mlflow_run_id"]
    points = {name: client.get_metric_history(run_id, name) for name in _figures(run)}
    return client.get_run(run_id), {name: [(m.step, m.value) for m in found] for name, found in points.items()}


def test_a_server_killed_in_mid_training_and_started_again_has_all_of_the_run(
    inputs: Path, storage: Path, port: int, tmp_path: Path
) -> None:
    sent = storage / "runs" / "revived" / "training.partial" / "mlflow_sent"
    with ExitStack() as stack, ThreadPoolExecutor(1) as beside:
        server = stack.enter_context(mlflow_server(tmp_path, port))
        (inputs / "hold").write_text("3")

        def fault() -> None:
            _until_waiting(inputs, 3)
            wait_for(sent.exists)
            kill_group(server)
            (inputs / "hold").write_text("5")  # two updates without a server
            _until_waiting(inputs, 5)
            stack.enter_context(mlflow_server(tmp_path, port))
            (inputs / "hold").unlink()

        injected = beside.submit(fault)
        run = _run(inputs, "revived")
        injected.result()
        tracked, figures = _tracked(run)
        assert figures == _figures(run)
        assert tracked.info.status == "FINISHED"
        _assert_complete(run, tracked)
        assert_traced(run)


def _assert_complete(run: Path, tracked: Any) -> None:
    """What the run is to be known by, beside the figures of its training."""
    config = load_config(run / "config.toml")
    plan = json.loads((run / "plan.json").read_text())["plan"]
    assert plan.pop("sources") == []
    logged = {name.removeprefix("plan."): it for name, it in tracked.data.params.items() if name.startswith("plan.")}
    assert logged == {name: str(value) for name, value in plan.items() if value is not None}
    assert tracked.data.params["train.learning_rate"] == str(config.train.learning_rate)
    assert tracked.data.params["rewards.0.function"] == FUNCTION
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=CONFIG.parent, capture_output=True, text=True)
    assert tracked.data.tags.get("mlflow.source.git.commit", "") == head.stdout.strip()
    assert tracked.data.tags.get("mlflow.source.git.dirty", "") in (("True", "False") if head.stdout else ("",))
    inputs = {given.dataset.name: given for given in tracked.inputs.dataset_inputs}
    assert {name: given.tags[0].value for name, given in inputs.items()} == {"train": "training", "eval": "evaluation"}
    assert json.loads(inputs["train"].dataset.source) == {"uri": config.data.train}
    assert json.loads(inputs["eval"].dataset.profile) == {"num_rows": 16}
    registered = json.loads((run / "registration.json").read_text())
    version = MlflowClient().get_model_version(registered["model_name"], registered["version"])
    assert f"train {inputs['train'].dataset.digest}" in version.description
    report = json.loads((run / "evaluation" / "report.json").read_text())
    reward = report["sets"]["held-out"]["policies"]["trained"]["reward"]["mean"]  # which decides: it is no 0 or 1
    assert version.tags["evaluation.held-out.trained.reward"] == f"{reward:.4f}"
    prompts = sorted(map(repr, read_parquet(run / "evaluation" / "samples.parquet")["prompt"].unique()))
    assert version.tags["prompts.held-out"] == hashlib.sha256("\n".join(prompts).encode()).hexdigest()[:16]
    assert version.run_id == tracked.info.run_id
    kept = {file.path for file in MlflowClient().list_artifacts(tracked.info.run_id)}
    assert kept >= {"config.toml", "plan.json", "result.json", "metrics.jsonl", "evaluation", "dataset", "training"}


def test_figures_of_a_server_that_stays_dead_are_sent_by_register_and_a_rerun_stage_keeps_the_run(
    inputs: Path, storage: Path, port: int, tmp_path: Path
) -> None:
    from flows.stages import evaluate_run, register_run

    run = storage / "runs" / "dead"
    with ThreadPoolExecutor(1) as beside:
        (inputs / "hold").write_text("3")
        with mlflow_server(tmp_path, port) as server:

            def fault() -> None:
                _until_waiting(inputs, 3)
                kill_group(server)
                (inputs / "hold").unlink()

            injected = beside.submit(fault)
            with pytest.raises(Exception, match=rf"127\.0\.0\.1.*{port}"):  # evaluate asks it for the champion
                _run(inputs, "dead")
            injected.result()
    trained = (run / "training" / "result.json").stat().st_mtime_ns
    with mlflow_server(tmp_path, port):
        _run(inputs, "dead")
        assert (run / "training" / "result.json").stat().st_mtime_ns == trained
        first, figures = _tracked(run)
        assert figures == _figures(run)
        assert first.info.status == "FINISHED"
        assert_traced(run)
        evaluate_run("dead", force=True)
        register_run("dead")
        again, figures = _tracked(run)
        assert again.info.run_id == first.info.run_id
        assert figures == _figures(run)
        assert json.loads((run / "registration.json").read_text())["version"] == "2"
        assert_traced(run, versions=2)


def test_a_run_without_a_server_is_refused_before_it_trains(inputs: Path, storage: Path, port: int) -> None:
    with pytest.raises(Exception, match=rf"MLflow at http://127\.0\.0\.1:{port} does not answer.*start the server"):
        _run(inputs, "refused")
    assert not (storage / "runs" / "refused" / "training.partial").exists()
