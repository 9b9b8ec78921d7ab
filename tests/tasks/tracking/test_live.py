"""What a training says and does is seen while it runs: all of it in files, the newest of it in Prefect, and where that
does not take it the log says so once."""

from __future__ import annotations

import json
import logging
import uuid
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES

from grpo_core.planning.plan import make_plan
from grpo_core.planning.rules import PlanInputs
from tasks import validate
from tasks.rendering.drawing import draw_curves
from tasks.tracking import artifacts, live
from tasks.tracking.live import LAST_LINES, LINES_AT_ONCE, LINES_PER_SECOND, Figures, Output, live_table, machines_line

LOG = logging.getLogger("training output")


def _row(step: int, **figures: float) -> dict[str, float]:
    return {
        "step": step,
        "reward": 0.5,
        "completions/mean_length": 5.0,
        "num_tokens": 100 * step,
        "step_time": 2.0,
    } | figures


def test_a_flood_is_logged_at_a_bounded_rate_and_kept_whole_in_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    time = 0.0
    output = Output(tmp_path / "output.log", LOG, clock=lambda: time)
    lines = [f"line {n}" for n in range(1000)]
    lines[500], lines[600] = "health: step 3: no completion has an advantage", "ValueError: wrong"
    for line in lines:
        time += 0.01
        output.line(line)
    output.close()
    assert (tmp_path / "output.log").read_text().splitlines() == lines
    logged = [record.getMessage() for record in caplog.records]
    assert {*lines[:10], lines[500], lines[600]} < {*logged}
    assert logged[-10:] == lines[-10:]
    notes = [line for line in logged if line.startswith("…")]
    shown = len(logged) - len(notes)
    assert shown <= LINES_AT_ONCE + 10 * LINES_PER_SECOND + LAST_LINES + 2
    assert shown + sum(int(note.split()[1]) for note in notes) == len(lines)
    (finding,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert finding.getMessage() == lines[500]


def test_the_output_of_a_second_attempt_goes_after_that_of_the_first(tmp_path: Path) -> None:
    for line in ("first", "second"):
        output = Output(tmp_path / "output.log", LOG)
        output.line(line)
        output.close()
    assert (tmp_path / "output.log").read_text() == "first\nsecond\n"


def test_figures_are_read_as_they_come_and_anew_when_training_went_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    figures = Figures(path)
    assert [*figures.read()] == []
    with path.open("a") as file:
        for step in (1, 2):
            file.write(json.dumps(_row(step)) + "\n")
            file.flush()
            assert [*figures.read()] == [_row(step)]
        file.write('{"step": 3, "rew')
    assert [*figures.read()] == []
    with path.open("a") as file:
        file.write('ard": 1}\n')
    assert [*figures.read()] == [{"step": 3, "reward": 1}]
    path.rename(tmp_path / "old")
    path.write_text(json.dumps(_row(1)) + "\n")
    assert [*figures.read()] == [_row(1)]
    figures.close()


def test_the_live_table_has_the_newest_updates_and_the_time_left_by_the_plan() -> None:
    plan = make_plan(PlanInputs(8, 4, 8, max_completion_length=4, max_steps=100))
    conversations = {"conversations/mean_turns": 2.5, "conversations/failed_tool_calls": 0.25}
    table = live_table([_row(1), _row(2, step_time=4.0, kl=0.01, **conversations)], plan)
    assert table == [
        {
            "step": 2,
            "reward": "0.500",
            "KL": "0.0100",
            "length": "5.0",
            "turns": "2.5",
            "failed calls": "0.25",
            "tokens/s": "25",
            "time left": "4 min 54 s",
        },
        {"step": 1, "reward": "0.500", "length": "5.0", "tokens/s": "50", "time left": "3 min 18 s"},
    ]
    assert live_table([_row(1, step_time=60.0), _row(2), _row(3)], plan)[0]["time left"] == "3 min 14 s"


@pytest.mark.slow
def test_curves_are_drawn_of_whatever_figures_there_are() -> None:
    for rows in ([_row(1)], [_row(n, kl=0.1, entropy=1.0) for n in range(1, 60)]):
        assert draw_curves(rows).startswith(b"\x89PNG")


def test_several_machines_are_shown_with_their_pace() -> None:
    assert machines_line(_row(1)) == ""
    rates = {f"time/machine_{number}/tokens_per_second": 1000.4 + number for number in range(12)}
    assert machines_line(_row(1, **rates)).startswith("; the machines sample 1,000, 1,001, 1,002, 1,003")


WORDS = "All connection attempts failed"


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a request may be repeated, for each artifact that was refused."""
    retries = []

    def refuse(*_: Any, **__: Any) -> None:
        retries.append(PREFECT_CLIENT_MAX_RETRIES.value())
        raise ConnectionError(WORDS)

    for module in (artifacts, live):
        for function in ("create_markdown_artifact", "create_table_artifact", "create_progress_artifact"):
            if hasattr(module, function):
                monkeypatch.setattr(module, function, refuse)
    monkeypatch.setattr(artifacts, "get_run_logger", lambda: logging.getLogger("stage"))
    return retries


def test_a_stage_says_which_artifact_is_missing_and_why(refused: list[int], caplog: pytest.LogCaptureFixture) -> None:
    validate._show({"num_prompts": {"train": 24}, "num_groups": {}, "findings": []}, "# Data")
    assert (refused, len(caplog.records)) == ([1], 1)
    assert "data-report could not be written" in caplog.text and WORDS in caplog.text


def test_a_training_says_once_that_it_is_not_shown_and_is_shown_as_soon_as_it_can_be(
    refused: list[int], caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"step": 1, "reward": 0.5, "completions/mean_length": 5.0, "num_tokens": 100, "step_time": 2.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    plan = make_plan(PlanInputs(8, 4, 8, max_completion_length=4, max_steps=1))
    shown = live.Live(tmp_path / "metrics.jsonl", plan, "")
    shown.show()
    assert (refused, len(caplog.records)) == ([1, 1], 1)
    written = []
    monkeypatch.setattr(live, "create_progress_artifact", lambda *_, **__: uuid.uuid4())
    client = mock.MagicMock()
    client.__enter__().update_artifact = lambda _, change: written.append(change.description)
    monkeypatch.setattr(live, "get_client", lambda **_: client)
    monkeypatch.setattr(live, "create_table_artifact", lambda table, **_: written.append(table[0]["step"]))
    shown.show()
    assert [str(it)[:1] for it in written] == ["1", "1"]  # the table's newest step, and the progress
