"""Adapters of mixtures of experts, whose experts are one tensor per layer, against peft's own merge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

from grpo_core.config.inputs import ModelConfig
from grpo_core.model.loading import (
    copy_of_whole_weights,
    in_checkpoint_layout,
    load_model,
    trainable_state,
    whole_weights,
    with_adapter,
)
from grpo_core.model.saving import save_model
from tests.conftest import make_model, make_tokenizer

IDS = torch.arange(10)[None]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}
ATTENTION, BOTH = ["q_proj", "v_proj"], ["q_proj", "gate_proj", "up_proj", "down_proj"]


def _adapted(folder: Path, targets: list[str] | None) -> tuple[Any, ModelConfig]:
    config = ModelConfig(name_or_path=str(folder), use_peft=True, lora_r=3, lora_target_modules=targets)
    model = with_adapter(load_model(folder), config)
    torch.manual_seed(5)
    for parameter in trainable_state(model).values():
        parameter += 0.1 * torch.randn_like(parameter)
    return model, config


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    return model(input_ids=IDS).logits


@pytest.mark.slow
@pytest.mark.parametrize("targets", [None, ATTENTION, BOTH], ids=["default", "attention", "experts too"])
@pytest.mark.parametrize("architecture", ["Qwen3Moe", "Mixtral", "Olmoe"])
def test_what_engines_get_and_what_is_saved_is_what_peft_merges(
    tmp_path: Path, architecture: str, targets: list[str] | None
) -> None:
    folder = make_model(tmp_path / "base", architecture, **EXPERTS)
    if architecture == "Mixtral" and targets == BOTH:
        targets = ["q_proj", "w1", "w3", "w2"]
    model, config = _adapted(folder, targets)
    trained = {name for name in trainable_state(model) if ".experts." in name}
    assert bool(trained) == (targets != ATTENTION)
    assert not torch.allclose(_logits(model), _logits(load_model(folder)), atol=0.1)

    save_model(model, make_tokenizer(), tmp_path / "model", config)
    merged = PeftModel.from_pretrained(load_model(folder), tmp_path / "adapter").merge_and_unload()
    torch.testing.assert_close(_logits(merged), _logits(model), atol=1e-4, rtol=1e-4)
    expected = merged.state_dict()
    for found in (
        dict(whole_weights(model)),
        copy_of_whole_weights(model),
        load_model(tmp_path / "model").state_dict(),
    ):
        torch.testing.assert_close({**found}, {**expected})

    merged.save_pretrained(tmp_path / "merged")
    file = load_file(tmp_path / "merged" / "model.safetensors")
    torch.testing.assert_close(dict(in_checkpoint_layout(model, whole_weights(model))), file)
    assert any(".experts.3." in name for name in file)


def test_a_dense_model_has_the_names_of_its_checkpoint_already(model_folder: Path) -> None:
    model = load_model(model_folder)
    found = dict(in_checkpoint_layout(model, model.state_dict().items()))
    torch.testing.assert_close(found, load_file(model_folder / "model.safetensors"))
