"""An artifact that Prefect's server does not take fails no stage: the log says it once, with the reason."""

from __future__ import annotations

import json
import logging
import uuid
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES

from grpo_core.planning.plan import make_plan
from grpo_core.planning.rules import PlanInputs
from tasks import validate
from tasks.tracking import artifacts, live

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
    monkeypatch.setattr(live, "update_progress_artifact", lambda *_, **of: written.append(of["description"]))
    monkeypatch.setattr(live, "create_table_artifact", lambda table, **_: written.append(table[0]["step"]))
    shown.show()
    assert [str(it)[:1] for it in written] == ["1", "1"]
