"""The stage plan refuses what no GPU should be waited for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_core.config.files import load_config
from grpo_core.errors import ConfigError
from tasks import plan as stage
from tasks.stages.run import Context
from tests.conftest import config_values, make_run, with_keys, write_sums
from tests.grpo_core.training.training import trained_run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "first", "message"),
    [
        ({"max_steps": 3}, 10, "has 2 generation batches, and the plan takes 3: set train.max_steps to 2 or less"),
        ({"max_steps": 2}, 11, r"has another prompt in row \d+ than data.train="),
    ],
    ids=["too short", "of other prompts"],
)
def test_a_recording_that_the_training_could_not_take_is_refused(
    model_folder: Path, tmp_path: Path, keys: dict[str, Any], first: int, message: str
) -> None:
    values = config_values(model_folder, tmp_path)
    recorded = trained_run(tmp_path / "recorded", values, max_steps=2)
    run = make_run(tmp_path / "run", with_keys(values, engine="recorded", recording=str(recorded), **keys))
    write_sums(run / "dataset" / "train.parquet", first, first + 24)
    parts = {"train": {"num_prompts": 24}, "eval": {"num_prompts": 16}}
    receipt = {"num_prompts": {"train": 24, "eval": 16}, "parts": parts, "lengths": {"train": {"mean": 5.0, "max": 6}}}
    (run / "dataset" / "report.json").write_text(json.dumps(receipt))
    with pytest.raises(ConfigError, match=message):
        stage._work(Context(load_config(run / "config.toml"), run, run / "plan.json.partial"))
