"""A sharded model, by two real processes over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from grpo_core.config.training import TrainConfig
from grpo_core.model.sharded import forward, sharding
from tests.grpo_core.training.several import in_two_processes

IDS = torch.arange(10)[None]


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False])
def test_a_pass_that_an_error_ends_leaves_shards_and_the_next_one_computes_the_same(
    model_folder: Path, tmp_path: Path, training: bool
) -> None:
    """As when the model's way to take packed batches is tried, and when a checkpoint is saved after an error."""
    expected = AutoModelForCausalLM.from_pretrained(model_folder)(input_ids=IDS).logits.detach()

    def work(rank: int) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(model_folder)
        shard = sharding(TrainConfig(sharding="full", num_processes=2, mixed_precision="no"), frozen=False)
        assert shard is not None
        shard(model)

        def fails(*_: Any) -> None:
            raise RuntimeError("planted")

        with torch.set_grad_enabled(training):
            forward(model, input_ids=IDS)
            planted = model.model.layers[1].mlp.register_forward_hook(fails)
            with pytest.raises(RuntimeError, match="planted"):
                forward(model, input_ids=IDS)
            planted.remove()
            assert all(isinstance(weight, DTensor) for weight in model.parameters())
            logits = forward(model, input_ids=IDS).logits
        torch.testing.assert_close(logits, expected)
        if training:
            logits.sum().backward()
            assert all(isinstance(weight.grad, DTensor) for weight in model.parameters())

    in_two_processes(tmp_path, work)
