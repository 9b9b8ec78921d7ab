"""vLLM for real, on the CPU in float32: after every weight update it samples from the trainer's policy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import config_values, make_model, make_run

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow

# A size at which vLLM packs its linear layers, so that the packed copy of a tied head goes stale on a reload.
PACKED = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_the_engine_follows_the_trainer_through_every_update(tmp_path: Path, tied: bool) -> None:
    model = make_model(tmp_path / "model", tie_word_embeddings=tied, initializer_range=0.1, **PACKED)
    values = config_values(model, tmp_path, max_steps=5)
    values["rewards"] = [{"function": "tests.grpo_core.test_trainer:parity"}]
    values["rollout"]["engine"] = "vllm"
    run = make_run(tmp_path / "run", values)
    done = subprocess.run(
        [sys.executable, "-m", "grpo_core.train", str(run)], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (run / "training" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 5
    assert [step["sampling/sampling_logp_difference/max"] < 1e-4 for step in steps] == [True] * 5
    assert all(step["grad_norm"] > 0 for step in steps)
