"""`grpo status` on a run whose files another program, another version or a dying disk has changed."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from flows.cli.status import progress_line
from grpo_core.system.progress import RANKS, Record
from tasks.processes.stacks import HANG
from tasks.stages.lineage import lineage_keys
from tasks.stages.run_directory import read_config
from tasks.stages.table import EVALUATE, PLAN, STAGES, TRAIN, VALIDATE, Stage
from tests.made_up import made_up_run, metrics_of, outcomes_of, samples_of, values_of

FIGURES = {
    "validate": "24 + 60 prompts",
    "plan": "50 updates planned",
    "train": "50 updates",
    "evaluate": "accuracy +",
    "register": "sums version 3",
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    samples = samples_of({"base": outcomes_of(0, 0.2), "trained": outcomes_of(1, 0.8)})
    folder = made_up_run(tmp_path / "runs" / "test", values_of("test"), samples, metrics_of())
    (folder / "registration.json").write_text(json.dumps({"model_name": "sums", "version": "3"}))
    for name in ("train", "eval"):
        (folder / "dataset" / f"{name}.parquet").touch()
    return folder


def _rows() -> dict[str, str]:
    shown = CliRunner().invoke(app, ["status", "test"])
    assert shown.exit_code == 1, shown.exception
    rows = [line for line in shown.output.splitlines() if line.startswith("│")]
    assert [row.split()[1] for row in rows] == [stage.name for stage in STAGES]
    assert CliRunner().invoke(app, ["status"]).exit_code == 0
    return {row.split()[1]: row for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damaged", "content"),
    zip(STAGES, [b"", b'{"lineage_key": "ab', b"null", b"{}", b"\x00\xff"], strict=True),
    ids=lambda value: value.name if isinstance(value, Stage) else repr(value),
)
def test_status_names_a_receipt_that_is_damaged_and_shows_the_other_stages(
    run: Path, damaged: Stage, content: bytes
) -> None:
    damaged.receipt_path(run).write_bytes(content)
    for name, row in _rows().items():
        if name == damaged.name:
            assert f"{damaged.receipt_path(run).relative_to(run)} is damaged" in row
        else:
            assert FIGURES[name] in row


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "key", "condition"),
    [
        (VALIDATE, "num_prompts", "is damaged"),
        (PLAN, "plan", "not in plan.json"),
        (TRAIN, "counted", "not in training/result.json"),
        (EVALUATE, "sets", "not in evaluation/report.json"),
        (EVALUATE, "made_at", FIGURES["evaluate"]),
        (EVALUATE, "inputs", "evaluation/report.json is damaged"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_status_says_which_receipt_lacks_a_figure(run: Path, stage: Stage, key: str, condition: str) -> None:
    receipt = {**stage.read_receipt(run), key: None}
    stage.receipt_path(run).write_text(json.dumps(receipt))
    rows = _rows()
    assert condition in rows[stage.name]
    for other in {*FIGURES} - {stage.name}:
        assert FIGURES[other] in rows[other]


def test_saved_updates_of_a_training_are_left_out_if_the_plan_cannot_be_read(run: Path) -> None:
    (run / "training" / "checkpoints" / "step-000002").mkdir(parents=True)
    (run / "training").rename(run / "training.partial")
    marker = {"lineage_key": lineage_keys(read_config(run))["train"]}
    (run / "training.partial" / "lineage.json").write_text(json.dumps(marker))
    assert "2 of 50 updates saved" in _rows()["train"]
    (run / "plan.json").write_text('{"plan": null}')
    assert "not done yet" in _rows()["train"]


def _record(rank: int, machine: str, phase: str, **values: Any) -> Record:
    others = {"reward": "", "waits": False, "since": 1000, "moves": 1, "moved": 1010 + rank, "limit": 600}
    return Record(rank=rank, ranks=7, machine=machine, host="box", pid=1, phase=phase, **{**others, **values})


def test_status_says_on_which_machines_a_training_runs_and_what_it_does(run: Path) -> None:
    (run / "training").rename(run / "training.partial")
    ranks = run / "training.partial" / RANKS
    ranks.mkdir()
    records = [_record(0, "a", "rewards", reward="judge"), *(_record(rank, "b", "sampling") for rank in range(1, 6))]
    for record in (*records, _record(6, "b", "update", waits=True)):
        (ranks / f"{record.rank}.json").write_text(json.dumps(vars(record)))
    since = f"{datetime.fromtimestamp(1000):%H:%M:%S}"
    doing = f"rewards (judge) since {since} (rank 0); sampling since {since} (rank 1, 2, 3, 4, …)"
    assert progress_line(TRAIN, ranks, 1020) == f"train runs on a, b: {doing}; moved 4 s ago"
    shown = CliRunner().invoke(app, ["status", "test"]).output
    assert doing in " ".join(shown.split())


def test_status_says_why_a_training_was_ended_that_hung(run: Path) -> None:
    (run / "training").rename(run / "training.partial")
    ranks = run / "training.partial" / RANKS
    assert progress_line(TRAIN, ranks, 0) == ""
    ranks.mkdir()
    (ranks / HANG).write_text("rank 3 has not moved")
    assert progress_line(TRAIN, ranks, 0) == "train was ended, since it hung: rank 3 has not moved"
