"""A run with demonstrations through all stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.rows import write_lines
from tests.served.conftest import TaskStates, run_pipeline


@pytest.mark.e2e
def test_a_run_with_demonstrations_begins_from_a_warm_start_and_says_what_it_gave(
    storage: Path, inputs: Path, tmp_path: Path, task_states: TaskStates
) -> None:
    from flows.stages import FLOWS
    from tasks.tracking.runs import connect

    rows = [{"prompt": f"{n}+{n}=", "completion": str(2 * n)} for n in range(10, 50)]
    shown = write_lines(tmp_path / "shown.jsonl", rows)
    keys = {"demonstrations": shown, "batch_size": 8, "max_steps": 5, "learning_rate": 0.01}
    given = [*(f"warm_start.{key}={value}" for key, value in keys.items()), "model.use_peft=true"]
    folder = run_pipeline(inputs, "name=warm", *given)
    assert folder == storage / "runs" / "warm"
    order = ["validate", "plan", "warm-start", "train", "evaluate", "register"]
    assert task_states("warm", len(order)) == [(stage, "Completed") for stage in order]
    assert (folder / "warm-start" / "adapter" / "adapter_config.json").is_file()
    lines = [json.loads(line) for line in (folder / "warm-start" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 5 and lines[-1]["loss"] < lines[0]["loss"]
    report = json.loads((folder / "evaluation" / "report.json").read_text())
    assert {"base", "warm-start", "trained"} <= {*report["policies"]}
    registration = json.loads((folder / "registration.json").read_text())
    logged = connect().get_run(registration["mlflow_run_id"]).data.metrics
    for name, line in ("first", lines[0]), ("last", lines[-1]):
        assert logged[f"warm_start/{name}_loss"] == line["loss"]
    FLOWS["warm-start"]("warm", force=True)
    assert task_states("warm-warm-start", 1) == [("warm-start", "Completed")]
    run_pipeline(inputs, "name=warm", *given)
    assert task_states("warm", len(order)) == [(stage, "Skipped") for stage in order], "the model is the same"
