"""The stage plan refuses what no GPU should be waited for."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from grpo_core.config.files import load_config
from grpo_core.errors import ConfigError
from grpo_core.planning.hardware import named_gpu
from tasks import plan as stage
from tasks.stages.run import Context
from tests.conftest import config_values, make_run, with_keys, write_sums
from tests.grpo_core.training.training import trained_run
from tests.qwen import QWEN


def test_the_plan_that_a_training_reads_has_the_tokens_that_fit_the_gpu(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And no number of a CPU's, or of a GPU elsewhere whose memory is not known, which is said."""
    (tmp_path / "shape").mkdir()
    (tmp_path / "shape" / "config.json").write_text(json.dumps(QWEN["1.5B"]))
    keys = {"name_or_path": str(tmp_path / "shape"), "max_completion_length": 512, "per_device_train_batch_size": 1024}
    run = make_run(tmp_path / "run", config_values(model_folder, tmp_path, **keys, mixed_precision="bf16"), 1000)
    parts = {"train": {"num_prompts": 1000}, "eval": {"num_prompts": 16}}
    lengths = {"train": {"mean": 5.0, "max": 6}}
    receipt = {"num_prompts": {"train": 1000, "eval": 16}, "parts": parts, "lengths": lengths}
    (run / "dataset" / "report.json").write_text(json.dumps(receipt))
    monkeypatch.setenv("GRPO_MEASURE", "0")
    monkeypatch.setattr(stage, "get_run_logger", lambda: logging.getLogger("plan"))
    monkeypatch.setattr(stage, "show_table", lambda *_: None)
    monkeypatch.setattr(stage, "earlier_throughput", lambda *_: None)

    def planned() -> tuple[int | None, int | None]:
        made = stage._work(Context(load_config(run / "config.toml"), run, run / "plan.json.partial"))
        return made["plan"]["max_tokens_per_pass"], made["forecasts"].get("memory", {}).get("tokens_per_pass")

    monkeypatch.setattr(stage, "find_gpu", lambda: named_gpu("H100"))
    chosen, told = planned()
    assert chosen == told and 10_000 < (chosen or 0) < 1024 * 518
    monkeypatch.setattr(stage, "find_gpu", lambda: None)
    assert planned() == (None, None)
    assert "is not known" not in caplog.text
    monkeypatch.setenv("GRPO_GPU_DEPLOYMENT", "pool")
    assert planned()[0] is None
    assert "the memory of GPU of train/pool is not known: the plan neither says whether the run fits" in caplog.text


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
