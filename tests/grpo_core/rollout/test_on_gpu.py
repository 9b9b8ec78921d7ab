"""The transformers engine on a GPU, pretended: what a step waits for, what is captured, and what is said otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from grpo_core.model.loading import load_model
from grpo_core.rollout.transformers_engine import TransformersEngine
from grpo_core.rollout.types import Request, Sampling
from tests.pretend_gpu import CUDA, Gpu, pretend_gpu


def waits_per_token(gpu: Gpu, model: Any, tokenizer: Any, completions: int, sampling: Sampling) -> float:
    """Waits of the host per step in which no completion joins or leaves."""
    model.generation_config.eos_token_id = tokenizer.eos_token_id = None
    engine = TransformersEngine(model, tokenizer)
    engine.end_ids = torch.tensor([], dtype=torch.int64)
    steps = engine.generate([Request([3, 4], completions, 0)], sampling)
    for _ in range(2):
        next(steps)
    gpu.waits.clear()
    for _ in range(4):
        next(steps)
    assert not gpu.mismatches
    return len(gpu.waits) / 4


@pytest.mark.slow
def test_a_step_waits_once_for_the_rows_that_go_on_and_once_for_their_stop_texts(model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    with pretend_gpu() as gpu:
        model = load_model(model_folder, device=CUDA)
        found = {
            (rows, stop): waits_per_token(gpu, model, tokenizer, rows, Sampling(20, 1.0, stop=stop))
            for rows in (2, 64)
            for stop in ((), ("1+1=9",))
        }
    assert found == {(2, ()): 1, (64, ()): 1, (2, ("1+1=9",)): 2, (64, ("1+1=9",)): 2}
