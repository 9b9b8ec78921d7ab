"""MLflow's SQLite file on a full disk: it is named with its size, and works again as soon as there is room."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tasks.stages.mlflow_address import TrackingError
from tasks.tracking.runs import answering, connect
from tests.small_disk import fill, small_disk

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


def test_a_disk_that_is_full_before_the_database_is_made_leaves_no_half_of_it(storage: Path) -> None:
    with small_disk(storage / "mlflow", "4m"):
        filler = fill(storage / "mlflow", left_free=300_000)  # for a third of its tables
        with pytest.raises(TrackingError, match=r"mlflow\.db \(not made yet\) is full: make room there, then run"):
            connect()
        assert [*(storage / "mlflow").iterdir()] == [filler]
        filler.unlink()
        assert connect().search_experiments()


def test_a_disk_that_becomes_full_is_named_and_nothing_is_lost(storage: Path) -> None:
    with small_disk(storage / "mlflow", "4m"):
        client = connect()
        run = client.create_run("0").info.run_id
        client.log_metric(run, "reward", 0.5, step=1)
        filler = fill(storage / "mlflow")
        with (
            pytest.raises(TrackingError, match=r"mlflow\.db \(\d\.\d MiB\) is full: make room there, then run"),
            answering(),
        ):
            for step in range(2, 1000):
                client.log_metric(run, "reward", 0.5, step=step)
        filler.unlink()
        with answering():
            client.log_metric(run, "reward", 0.75, step=1000)
        values = [metric.value for metric in client.get_metric_history(run, "reward")]
        assert (values[0], values[-1]) == (0.5, 0.75)


def test_a_database_is_made_where_files_cannot_be_linked(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert connect().search_experiments()
    assert (storage / "mlflow" / "mlflow.db").stat().st_size
