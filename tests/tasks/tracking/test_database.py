"""MLflow's SQLite file on a full disk, which is named with its size and works again as soon as there is room; and one
that cannot be used."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import mlflow
import pytest

from tasks.stages.mlflow_address import TrackingError
from tasks.tracking.runs import answering, connect, open_experiment
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


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda file: file.write_bytes(b"damaged" * 1000), r"file is not a database"),
        (lambda file: _set_revision(file, "deadbeef"), r"out-of-date database schema .*deadbeef"),
    ],
)
def test_a_database_that_cannot_be_used_is_named_with_the_reason_and_what_to_do(
    spoil: Callable[[Path], None], reason: str, storage: Path, embed_mlflow: Callable[[Path], None]
) -> None:
    embed_mlflow(storage)
    spoil(storage / "mlflow" / "mlflow.db")
    expected = rf"MLflow's database sqlite:///.*mlflow\.db cannot be used \(.*{reason}.*\): see that it runs .* backup$"
    with pytest.raises(TrackingError, match=expected) as error, answering():
        connect().search_experiments()
    assert "\n" not in str(error.value)


def _set_revision(file: Path, revision: str) -> None:
    with closing(sqlite3.connect(file)) as database:
        database.execute("UPDATE alembic_version SET version_num = ?", [revision])
        database.commit()


def test_a_deleted_experiment_or_run_is_refused_with_the_way_back(
    storage: Path, embed_mlflow: Callable[[Path], None]
) -> None:
    embed_mlflow(storage)
    client = connect()
    kept, deleted = (client.create_experiment(name) for name in ("kept", "gone"))
    client.delete_experiment(deleted)
    with pytest.raises(TrackingError, match=rf"experiment 'gone' was deleted: .* restore -x {deleted}\), or name"):
        open_experiment(client, "gone")
    run_id = client.create_run(kept).info.run_id
    client.delete_run(run_id)
    expected = r"'active' state.*Restore it in MLflow, or train again with --force"
    with pytest.raises(TrackingError, match=expected), answering():
        client.log_metric(run_id, "reward", 1.0)


def test_an_experiment_that_another_command_makes_meanwhile_is_taken(
    storage: Path, embed_mlflow: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    embed_mlflow(storage)
    client, made, create = connect(), [], mlflow.MlflowClient.create_experiment

    def create_twice(*args: Any) -> str:
        made.append(create(*args))
        return create(*args)

    monkeypatch.setattr(mlflow.MlflowClient, "create_experiment", create_twice)
    assert [open_experiment(client, "shared")] == made
