"""A training on the completions of an earlier run: nothing is sampled and no reward is called."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from grpo_core.errors import ConfigError
from grpo_core.planning.plan import load_plan
from grpo_core.rewards import contract
from grpo_core.rollout import factory
from grpo_core.training import session as sessions
from grpo_core.training.loop import train
from tests.conftest import make_run, with_keys
from tests.grpo_core.training import killing
from tests.grpo_core.training.training import assert_same, figures_of, metrics_of, result_of, trained_run, weights_of

# Off-policy updates with KL, whose rewards are weighted and gated: everything that follows from what was recorded.
KEYS = {"num_iterations": 2, "beta": 0.1, "max_steps": 4, "mask_truncated_completions": True}
MODEL = Path("training/model/model.safetensors")


@pytest.fixture(autouse=True)
def nothing_is_sampled_or_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a recording is there."""


def replayed(folder: Path, recording: Path, values: dict[str, Any], **keys: Any) -> Path:
    """A training on the recording, in which an engine or a reward would be an error."""
    run = make_run(folder, with_keys(values, engine="recorded", recording=str(recording), **keys))
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(sessions, "make_engine")
        patch.delattr(sessions, "resolve")
        train(run, run / "training")
    return run


def sampling_left_out(run: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if k != "sampling/sync_drift"} for row in figures_of(run)]


def test_a_training_on_a_recording_does_what_the_recorded_one_did(values: dict[str, Any], tmp_path: Path) -> None:
    recorded = trained_run(tmp_path / "recorded", values, **KEYS)
    run = replayed(tmp_path / "run", recorded, values, **KEYS)
    assert (run / MODEL).read_bytes() == (recorded / MODEL).read_bytes()
    assert figures_of(run) == sampling_left_out(recorded)
    assert result_of(run)["counted"] == result_of(recorded)["counted"]
