"""A small copy of a model has a layer of each of its kinds, and ends as a training with the model would."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import CONFIG_MAPPING

from grpo_core import try_small
from grpo_core.model.capabilities import decoder
from grpo_core.model.pretrained import without_weights
from grpo_core.model.small_copy import small_config
from tests.grpo_core.training.killing import in_child

# Layers by lists of kinds, of MLPs, of places or of positions, by the first ones, by periods, and by a pattern.
FAMILIES = ["deepseek_v32", "deepseek_v4", "glm_moe_dsa", "deepseek_v3", "llama4_text", "smollm3", "jamba", "gpt_oss"]
FAMILIES += ["kimi_linear", "recurrent_gemma", "exaone_moe", "afmoe", "hy_v4", "qwen3_5_text", "gemma3n_text"]
OTHERS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"decoder_sparse_step": 3, "mlp_only_layers": [2]},
    "bamba": {"attn_layer_indices": [9, 18]},
    "nemotron_h": {"layers_block_type": ["mamba", "moe"] * 4 + ["attention", "mlp", "mamba"]},
}


def _kinds(model: Any) -> set[str]:
    """What distinguishes layers: classes of their parts, and what these say by names and switches."""
    return {str(sorted(_said(layer))) for layer in decoder(model).layers}


def _said(layer: nn.Module) -> set[tuple[str, str, str]]:
    parts = dict(layer.named_modules())
    said = {(name, "", type(part).__name__) for name, part in parts.items() if "experts." not in name}
    switches = [(name, key, value) for name, part in parts.items() for key, value in vars(part).items()]
    return said | {(name, key, str(value)) for name, key, value in switches if isinstance(value, bool | str)}


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_a_small_copy_has_each_kind_of_layer_that_the_model_has(family: str) -> None:
    config = CONFIG_MAPPING[family](**OTHERS.get(family, {}))
    small = without_weights(small_config(config))
    assert _kinds(small) == _kinds(without_weights(config))
    assert sum(weights.numel() for weights in small.state_dict().values()) < 6e6


def _tried(folder: Path, family: str = "", **changes: Any) -> dict[str, str]:
    sizes = changes.pop("sizes", {})
    if family:
        CONFIG_MAPPING[family](**sizes).save_pretrained(folder)
    request = {"model": {"name_or_path": str(folder)}, "engine": "transformers", "max_length": 300, "bf16": False}
    return try_small.try_small(**{**request, "gradient_checkpointing": False, "router_keys": [], **changes})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "bf16"), [("qwen3_5_text", True), ("gpt_oss", False), ("deepseek_v32", False), ("doge", False)]
)
def test_a_model_that_is_trained_is_not_refused(family: str, bf16: bool, tmp_path: Path) -> None:
    """Nor for tokens that its copy lacks, or for a length that it does not take: prompts may be shorter. A packed pass
    of Doge leaves out a part, so that it is padded."""
    sizes = {"eos_token_id": 1998, "pad_token_id": 1999, "max_position_embeddings": 256}
    assert _tried(tmp_path, family, sizes=sizes, bf16=bf16) == {"refused": ""}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["jamba", "phimoe", "jetmoe"])
def test_a_mixture_whose_routers_cannot_be_read_is_refused_for_keys_that_read_them(family: str, tmp_path: Path) -> None:
    refused = _tried(tmp_path, family, router_keys=["routing_replay"])["refused"]
    assert "chooses cannot be read" in refused and "algorithm.routing_replay to false" in refused


def test_keys_of_mixtures_are_refused_for_another_model(model_folder: Path) -> None:
    refused = _tried(model_folder, router_keys=["router_aux_loss_coef", "routing_replay"])["refused"]
    assert "Qwen2ForCausalLM has no routers" in refused
    assert "remove router_aux_loss_coef and routing_replay" in refused


@pytest.mark.slow
def test_an_engine_that_cannot_sample_is_refused_where_it_samples(tmp_path: Path) -> None:
    refused = _tried(tmp_path, "rwkv")["refused"]
    assert "RwkvForCausalLM does not give a padded prompt" in refused
    assert _tried(tmp_path, engine="vllm") == {"refused": ""}


@pytest.mark.slow
def test_lengths_from_which_on_a_model_computes_otherwise_are_found_in_its_copy(tmp_path: Path) -> None:
    """Llama 4 scales queries by their position after 8,192 tokens, which shows where scores differ."""
    assert _tried(tmp_path, "llama4_text", max_length=4000) == {"refused": ""}
    found = re.search(
        r"logits differ from a plain pass's by ([\d.e-]+)", _tried(tmp_path, max_length=16_000)["refused"]
    )
    assert found and float(found[1]) > 0.005


@pytest.mark.slow
def test_a_precision_in_which_a_model_ends_in_an_error_is_refused_with_the_one_that_goes(tmp_path: Path) -> None:
    assert _tried(tmp_path, "minimax", engine="vllm") == {"refused": ""}
    refused = _tried(tmp_path, engine="vllm", bf16=True)["refused"]
    assert refused.startswith("with a small copy of it, RuntimeError: expected scalar type Float but found BFloat16")
    assert "set train.mixed_precision to 'no'" in refused


def test_a_model_that_no_class_trains_on_text_is_refused(tmp_path: Path) -> None:
    refused = _tried(tmp_path, "qwen2_5_vl", engine="vllm")["refused"]
    assert "no class by which a qwen2_5_vl is trained on text alone" in refused


def test_an_adapter_that_a_model_does_not_take_is_refused_unless_its_layers_are_numbered(model_folder: Path) -> None:
    """The copy has other numbers."""
    adapter = {"name_or_path": str(model_folder), "use_peft": True}
    assert (
        "not found in the base model"
        in _tried(model_folder, model={**adapter, "lora_target_modules": ["qq"]})["refused"]
    )
    numbered = {**adapter, "lora_target_modules": ["layers.40.self_attn.q_proj"]}
    assert _tried(model_folder, model=numbered) == {"refused": ""}


def test_a_copy_that_cannot_be_made_or_run_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HRM-text has a cache for several passes through its layers, whose number its copy does not have."""
    assert "list index out of range" in _tried(tmp_path, "hrm_text", sizes={"num_layers_per_stack": 2})["untried"]
    monkeypatch.setattr(try_small, "LARGEST", 100)
    assert "100 are the most" in _tried(tmp_path, "qwen2")["untried"]


def test_the_process_prints_what_it_found_last(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    request = {"model": {"name_or_path": str(model_folder)}, "engine": "transformers", "max_length": 30, "bf16": False}
    request |= {"gradient_checkpointing": False, "router_keys": []}
    monkeypatch.setattr(sys, "argv", ["try_small", json.dumps(request)])
    assert in_child(try_small.main) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1]) == {"refused": ""}
