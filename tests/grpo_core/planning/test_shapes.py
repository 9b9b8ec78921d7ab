"""Sizes of models, from their config.json, against those that transformers and peft make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from grpo_core.config.files import parse_config
from grpo_core.model.loading import with_adapter
from grpo_core.planning.shapes import ForecastError, adapter_parameters, model_shape, rank_of, trains_head
from tests.conftest import config_values
from tests.qwen import SIZES, qwen

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "head_dim": 64}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (Qwen2Config, {}),
        (Qwen2Config, {"tie_word_embeddings": True}),
        (LlamaConfig, {}),
        (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
        (MistralConfig, {"head_dim": 32}),
        (Qwen3Config, {"head_dim": 128}),
        (Qwen3Config, {"attention_bias": True, "tie_word_embeddings": True}),
        (Qwen3MoeConfig, EXPERTS),
        (Qwen3MoeConfig, {**EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [3], "tie_word_embeddings": True}),
        (Qwen3MoeConfig, {**EXPERTS, "mlp_only_layers": [0, 1, 2, 3, 4, 5], "attention_bias": True}),
    ],
)
def test_parameters_are_those_of_the_model(family: Any, changes: dict[str, Any]) -> None:
    config = family(**SIZES, **changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    shape, parameters = model_shape(config.to_dict()), sum(p.numel() for p in model.parameters())
    found = shape.parameters, shape.outside, shape.largest_layer
    assert found == (parameters, parameters - sum(layers), max(layers))


def test_a_token_passes_the_experts_that_it_takes() -> None:
    """Six layers of eight experts, of which a token takes two, each with three matrices of 256 by 96."""
    shape = model_shape(Qwen3MoeConfig(**SIZES, **EXPERTS).to_dict())
    assert shape.parameters - shape.active == 6 * (8 - 2) * 3 * 256 * 96
    dense = model_shape(Qwen2Config(**SIZES).to_dict())
    assert dense.active == dense.parameters


@pytest.mark.slow
@pytest.mark.parametrize("shape", [Qwen2Config(**SIZES), Qwen3MoeConfig(**SIZES, **EXPERTS)], ids=["plain", "experts"])
@pytest.mark.parametrize("targets", [None, ["q_proj", "down_proj"]])
def test_adapter_parameters_are_those_of_the_adapter(targets: list[str] | None, shape: Any) -> None:
    keys = {"use_peft": True, "lora_r": 4} | ({"lora_target_modules": targets} if targets else {})
    config = parse_config(config_values(Path("model"), Path("data"), **keys))
    model = with_adapter(AutoModelForCausalLM.from_config(shape), config.model)
    adapter = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert adapter_parameters(model_shape(shape.to_dict()), config) == adapter


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "modules", [["embed_tokens", "lm_head"], ["lm_head"], ["embed_tokens"], ["norm"], ["model.norm"]]
)
def test_modules_that_are_trained_whole_are_counted(modules: list[str], tied: bool) -> None:
    shape = Qwen2Config(**SIZES, tie_word_embeddings=tied)
    keys = {"use_peft": True, "lora_r": 4, "lora_modules_to_save": modules}
    config = parse_config(config_values(Path("model"), Path("data"), **keys))
    model = with_adapter(AutoModelForCausalLM.from_config(shape), config.model)
    sizes = model_shape(shape.to_dict())
    assert adapter_parameters(sizes, config) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trains_head(sizes, config) == model.get_output_embeddings().weight.requires_grad


def test_modules_whose_size_is_not_known_are_not_counted_as_nothing() -> None:
    keys = {"use_peft": True, "lora_modules_to_save": ["lm_head", "mlp"]}
    config = parse_config(config_values(Path("model"), Path("data"), **keys))
    with pytest.raises(
        ForecastError, match="lora_modules_to_save names 'mlp': what trains is counted for embed_tokens"
    ):
        adapter_parameters(model_shape(Qwen2Config(**SIZES).to_dict()), config)


@pytest.mark.parametrize("targets", [None, ["q_proj", "o_proj", "down_proj"]])
def test_what_goes_into_adapters_is_the_inputs_of_their_layers(targets: list[str] | None) -> None:
    shape = Qwen2Config(**SIZES)
    config = parse_config(config_values(Path("model"), Path("data"), use_peft=True, lora_target_modules=targets))
    model = with_adapter(AutoModelForCausalLM.from_config(shape), config.model)
    adapted = [module for module in model.modules() if hasattr(module, "lora_dropout")]
    expected = sum(module.in_features for module in adapted)
    linear = model_shape(shape.to_dict()).linear
    assert sum(number * it.inputs for it, number in linear if rank_of(it, config)) == expected


def test_qwen2_5_7b_has_the_parameters_of_its_model_card() -> None:
    assert qwen("7B").parameters == 7_615_616_512
