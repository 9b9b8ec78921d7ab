"""Multimodal checkpoints used for text: what is not trained on text is neither changed, lost nor adapted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from grpo_core.config.inputs import ModelConfig
from grpo_core.errors import ConfigError
from grpo_core.model import saving
from grpo_core.model.loading import in_checkpoint_layout, load_model, trainable_state, whole_weights, with_adapter
from grpo_core.model.small_copy import small_config, write_small_copy
from grpo_core.planning.adapter import base_notes
from grpo_core.rollout.vllm.adapter import sends_adapter_alone
from tasks.data.lengths import load_tokenizer_and_context
from tests.conftest import make_model, make_tokenizer

SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}  # as checkpoints have them
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"text_config": {"rope_parameters": SECTIONS}},
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}, "audio_config": {"model_type": "gemma4_audio"}},
}
# Families of which both of transformers' classes can be had, by the class that AutoModelForCausalLM makes: that of the
# whole, or of the text model alone.
WHOLE = ("gemma3", "gemma4", "got_ocr2")
TEXT_ALONE = ("llama4", "mllama", "qwen3_5", "qwen3_5_moe")
# Families that transformers makes with images only, and trains on text by that class.
IMAGES_ONLY = ("qwen2_5_vl", "mistral3", "idefics3")
# Not held: without a part for images in their configurations (Fuyu), or with that part inside the decoder (GIT); large
# with two layers; made with the package timm; without a default configuration; and one whose own checkpoints
# AutoModelForCausalLM does not read.
OTHERS = ("fuyu", "git", "gemma4_unified", "gemma3n", "qwen4_exp", "emu3")


def test_every_family_that_transformers_takes_both_ways_is_held_or_named() -> None:
    both = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys() & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    assert both <= {*WHOLE, *TEXT_ALONE, *OTHERS}


def _make_base(folder: Path, family: str) -> Path:
    """Save a small random copy of the family in bfloat16, as most are published."""
    torch.manual_seed(0)
    config = small_config(CONFIG_MAPPING[family](**TOWERS.get(family, {})))
    AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"size": 28}')
    return folder


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}


def _trained(config: ModelConfig) -> Any:
    """The model after an update on text."""
    model = with_adapter(load_model(config.name_or_path), config)
    for step in range(2):  # the first leaves the adapter's input side as it is
        model(torch.arange(4 + step, 20)[None]).logits.logsumexp(-1).sum().backward()
        with torch.no_grad():
            for weights in model.parameters():
                if weights.grad is not None:
                    weights -= 0.1 * weights.grad / weights.grad.norm().clamp(min=1e-9)
                    weights.grad = None
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["all weights", "adapter", "sharded"])
@pytest.mark.parametrize("family", [*WHOLE, *TEXT_ALONE, *IMAGES_ONLY])
def test_what_is_saved_is_the_whole_checkpoint_with_the_trained_text_model(
    family: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, saved = _make_base(tmp_path / "base", family), tmp_path / "model"
    keys = {"use_peft": True, "lora_r": 2} if way == "adapter" else {}
    config = ModelConfig(name_or_path=str(base), **keys)
    model = _trained(config)
    monkeypatch.setattr(saving, "is_sharded", lambda _: way == "sharded")
    saving.save_model(model, make_tokenizer(), saved, config)
    before, after = _tensors(base), _tensors(saved)
    assert before.keys() ^ after.keys() <= {"lm_head.weight"}
    towers = re.compile(r"visual|vision|connector|projector")
    text = {name for name in before if not towers.search(name)}
    beside = before.keys() - text
    assert beside
    for name in beside:
        torch.testing.assert_close(after[name].float(), before[name].float(), rtol=0, atol=0, msg=name)
        assert family not in TEXT_ALONE or after[name].dtype == torch.bfloat16
    assert any(not torch.equal(after[name].float(), before[name].float()) for name in text)
    whole, found = AutoModelForImageTextToText.from_pretrained(saved, output_loading_info=True)
    assert not found["missing_keys"]
    assert type(whole).__name__ == MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[family]
    assert json.loads((saved / "config.json").read_text())["model_type"] == family
    assert json.loads((saved / "preprocessor_config.json").read_text()) == {"size": 28}
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        expected = model(ids).logits
        kind = AutoModelForImageTextToText if family in IMAGES_ONLY else AutoModelForCausalLM
        for again in (kind.from_pretrained(saved).eval(), load_model(saved)):
            torch.testing.assert_close(again(ids).logits, expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*WHOLE, *TEXT_ALONE])
def test_engines_get_weights_under_the_checkpoints_names(family: str, tmp_path: Path) -> None:
    model = load_model(_make_base(tmp_path, family))
    sent = {name for name, _ in in_checkpoint_layout(model, whole_weights(model))}
    assert sent - _tensors(tmp_path).keys() <= {"lm_head.weight"}  # tied to the embedding
    adapts = ModelConfig(name_or_path=str(tmp_path), use_peft=True)
    assert sends_adapter_alone(adapts) == (family in WHOLE)  # else under names that vLLM's whole model does not have


@pytest.mark.slow
@pytest.mark.parametrize("family", [*WHOLE, *TEXT_ALONE, *IMAGES_ONLY])
def test_an_adapter_is_on_the_language_model_alone(family: str, tmp_path: Path) -> None:
    """Text would never train it elsewhere, though layers have the same names there."""
    model = load_model(_make_base(tmp_path, family))
    for targets in (None, ["q_proj"]):
        config = ModelConfig(name_or_path=str(tmp_path), use_peft=True, lora_r=2, lora_target_modules=targets)
        adapted = with_adapter(model, config)
        names = [*trainable_state(adapted)]
        assert names
        inside = (
            "model.model.layers."
            if family in TEXT_ALONE
            else "model.text_model."
            if family == "idefics3"
            else "model.language_model.layers."
        )
        assert all(inside in name or "language_model.per_layer" in name for name in names)
        model = adapted.unload()


@pytest.mark.slow
def test_a_small_copy_has_the_towers_of_its_model(tmp_path: Path) -> None:
    base = _make_base(tmp_path / "base", "qwen3_5")
    write_small_copy(base, None, tmp_path / "copy", 2**24)
    assert any(".visual." in name for name in _tensors(tmp_path / "copy"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "siglip"])
def test_a_checkpoint_that_is_no_language_model_is_refused_by_what_it_is(family: str, tmp_path: Path) -> None:
    CONFIG_MAPPING[family]().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    for refusal in (
        lambda: load_tokenizer_and_context(ModelConfig(name_or_path=str(tmp_path))),
        lambda: load_model(tmp_path),
    ):
        with pytest.raises(ConfigError, match=rf"no class by which a {family} is trained on text"):
            refusal()


@pytest.mark.slow
def test_the_plan_names_a_multimodal_base(tmp_path: Path) -> None:
    for family in (*WHOLE, *TEXT_ALONE):
        CONFIG_MAPPING[family](**TOWERS.get(family, {})).save_pretrained(tmp_path)
        [said] = base_notes(ModelConfig(name_or_path=str(tmp_path)))
        assert said.startswith(f"{tmp_path} is a multimodal model ({family}): its language model is trained on text")
    AutoConfig.from_pretrained(own := make_model(tmp_path / "own"))
    assert base_notes(ModelConfig(name_or_path=str(own))) == []
