"""What register writes for people: the result of a run in one line; and when it registers again."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks import register
from tasks.register import result_line
from tasks.stages.table import REGISTER
from tasks.tracking.runs import connect


def _report(metric: str, mean: float, gain: float) -> dict[str, Any]:
    def found(value: float) -> dict[str, float]:
        return {"mean": value, "low": value - 0.04, "high": value + 0.04}

    return {
        "sets": {
            "held-out": {"policies": {"trained": {metric: found(mean)}}, "differences": {"base": {metric: found(gain)}}}
        }
    }


def test_a_runs_result_is_its_figure_and_its_gain_with_their_intervals() -> None:
    line = result_line(_report("accuracy", 0.796, 0.36), "accuracy")
    assert line == "accuracy 79.6% [75.6, 83.6], +36.0 points [32.0, 40.0]"
    line = result_line(_report("reward", 1.5, -0.25), "reward")
    assert line == "reward 1.500 [1.460, 1.540], -0.250 [-0.290, -0.210]"


@pytest.mark.slow
def test_a_version_that_was_deleted_in_mlflow_is_registered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, embed_mlflow: Callable[[Path], None]
) -> None:
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(register, "get_run_logger", logging.getLogger)
    embed_mlflow(tmp_path)
    assert not register._is_deleted(tmp_path), "nothing is registered yet"
    client = connect()
    client.create_registered_model("sums")
    version = client.create_model_version("sums", str(tmp_path)).version
    REGISTER.path(tmp_path).write_text(json.dumps({"model_name": "sums", "version": version, "lineage_key": "1"}))
    assert not register._is_deleted(tmp_path)
    client.delete_model_version("sums", version)
    assert register._is_deleted(tmp_path)
    (tmp_path / "mlflow" / "mlflow.db").write_bytes(b"damaged" * 1000)
    assert not register._is_deleted(tmp_path), "MLflow does not say"
