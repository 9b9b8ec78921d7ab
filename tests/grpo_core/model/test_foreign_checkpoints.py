"""Checkpoints that others made: those whose weights are not the model's are refused, harmless differences are not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_core.config.inputs import ModelConfig
from grpo_core.errors import ConfigError
from grpo_core.model.loading import load_model, with_adapter
from tests.conftest import make_model

LAYER = "model.layers.1."


def _rewritten(
    folder: Path,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    architecture: str = "Qwen2",
    **changes: Any,
) -> Path:
    """Make a model, and write its weights again as `change` gives them."""
    make_model(folder, architecture, **changes)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return folder


def _without(part: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda weights: {name: each for name, each in weights.items() if part not in name}


def _with(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda weights: weights | {name: tensor}


WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], dict[str, Any], str]] = {
    "prefixed": (
        lambda weights: {f"module.{name}": each for name, each in weights.items()},
        {},
        r"27 weights are missing, such as lm_head.weight, .*: random ones would take their place; 27 saved weights "
        r"have no place in the model, such as module\.",
    ),
    "a layer missing": (_without(LAYER), {}, rf"12 weights are missing, such as {LAYER}"),
    "tied, and both missing": (_without("embed_tokens"), {"tie_word_embeddings": True}, "weights are missing"),
    "of another shape": (
        _with("model.norm.weight", torch.ones(8)),
        {},
        r"1 weights have another shape .* model\.norm.*: random ones",
    ),
    **{
        f"{place}{name}": (
            _with(f"{place}{name}", torch.ones(1)),
            {},
            rf"Qwen2ForCausalLM: 1 saved tensors are of quantised layers, such as .*{name}: load .* dequantised",
        )
        for name in ("weight_scale", "weight_scale_inv", "g_idx", "qzeros", "weight_packed", "weight_zero_point")
        for place in (f"{LAYER}mlp.up_proj.", LAYER.removeprefix("model.") + "mlp.up_proj.")
    },
    "bias of a projection without one": (
        _with(f"{LAYER}self_attn.o_proj.bias", torch.ones(64)),
        {},
        r"Qwen2ForCausalLM: 1 saved weights have no place in the model, such as .*o_proj.bias: what was saved computes",
    ),
    "attention's sinks": (_with(f"{LAYER}self_attn.sinks", torch.ones(2)), {}, "no place in the model, .*sinks: what"),
    "more layers than config.json says": (
        lambda weights: (
            weights | {name.replace(LAYER, "model.layers.2."): each.clone() for name, each in weights.items()}
        ),
        {},
        r"Qwen2ForCausalLM: 12 saved weights are of layers beyond the last, such as model.layers.2.*: config.json has",
    ),
    "part of a layer": (
        _with(f"{LAYER}indexer.k.weight", torch.ones(1)),
        {},
        "no place in the model, such as .*indexer",
    ),
    "not a number": (
        _with("model.norm.weight", torch.full((64,), torch.nan)),
        {},
        "NaN or infinity, .*model.norm.weight",
    ),
    "infinite": (
        _with("lm_head.weight", torch.full((15, 64), -torch.inf)),
        {},
        "NaN or infinity, such as lm_head.weight",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_a_checkpoint_that_is_not_the_whole_model_is_refused_with_its_weights_names(case: str, tmp_path: Path) -> None:
    change, changes, said = WRONG[case]
    folder = _rewritten(tmp_path / "model", change, **changes)
    with pytest.raises(ConfigError, match=said) as refused:
        load_model(folder)
    assert str(folder) in str(refused.value)


HARMLESS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], dict[str, Any]]] = {
    "head tied to the embedding": (_without("lm_head"), {"tie_word_embeddings": True}),
    "frequencies of older releases": (_with(f"{LAYER}self_attn.rotary_emb.inv_freq", torch.ones(16)), {}),
    "tower for images": (_with("model.visual.patch.weight", torch.ones(8)), {}),
    "layer that predicts a further token": (
        lambda weights: (
            weights | {f"model.layers.2.{name}": torch.ones(8) for name in ("mlp.up_proj.weight", "eh_proj.weight")}
        ),
        {},
    ),
    "classifier beside the head": (_with("score.weight", torch.ones(2, 64)), {}),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_what_a_checkpoint_has_beside_the_model_or_ties_is_no_reason_to_refuse_it(case: str, tmp_path: Path) -> None:
    folder = _rewritten(tmp_path / "model", *HARMLESS[case][:1], **HARMLESS[case][1])
    make_model(tmp_path / "own", **HARMLESS[case][1])
    found, expected = load_model(folder).state_dict(), load_model(tmp_path / "own").state_dict()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


GPT2: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 8}
NEO: dict[str, Any] = {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}


@pytest.mark.parametrize(
    ("architecture", "sizes", "home", "buffers"),
    [
        ("GPT2", GPT2, "transformer.h.0.attn.", ("masked_bias", "bias")),
        ("GPTNeo", NEO, "transformer.h.0.attn.attention.", ("masked_bias", "bias")),
        ("GPTJ", GPT2, "transformer.h.0.attn.", ("masked_bias", "bias", "embed_positions")),
        ("CodeGen", GPT2, "transformer.h.0.attn.", ("causal_mask",)),
        ("GPTBigCode", GPT2, "transformer.h.0.attn.", ("masked_bias", "bias")),
        ("GPTNeoX", {}, "gpt_neox.layers.0.attention.", ("masked_bias", "bias", "rotary_emb.inv_freq")),
        ("Falcon", {}, "transformer.h.0.self_attention.", ("rotary.inv_freq",)),
    ],
)
@pytest.mark.slow
def test_masks_and_positions_that_older_releases_saved_are_no_reason_to_refuse_a_checkpoint(
    architecture: str, sizes: dict[str, Any], home: str, buffers: tuple[str, ...], tmp_path: Path
) -> None:
    old = {f"{home}{name}": torch.ones(1, 1, 8, 8, dtype=torch.bool) for name in buffers}
    for names in (old, {name.partition(".")[2]: each for name, each in old.items()}):  # and of the base alone
        load_model(_rewritten(tmp_path / "model", lambda weights, names=names: weights | names, architecture, **sizes))


@pytest.mark.slow
@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], ["embed_tokens"]])
def test_an_adapter_of_tied_weights_is_refused_and_of_untied_ones_is_not(targets: list[str], tmp_path: Path) -> None:
    """Merged, its change would be in both, and in what engines are sent."""
    for tied in (True, False):
        folder = make_model(tmp_path / f"{tied}", tie_word_embeddings=tied)
        config = ModelConfig(name_or_path=str(folder), use_peft=True, lora_r=2, lora_target_modules=targets)
        refused = (
            pytest.raises(ConfigError, match=rf"on .*{targets[-1]}, whose .* lora_modules_to_save")
            if tied
            else nullcontext()
        )
        with refused:
            with_adapter(load_model(folder), config)
