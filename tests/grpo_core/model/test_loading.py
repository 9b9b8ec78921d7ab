"""Weights in bfloat16: those of float32 rounded, held once; an adapter is drawn and merged in float32 all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import Llama4TextConfig
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear
from transformers.models.llama4.modeling_llama4 import Llama4Router

from grpo_core.config.inputs import ModelConfig
from grpo_core.model.loading import _gives_product, load_model, trainable_state, with_adapter
from grpo_core.model.policy import Policy
from grpo_core.model.precision import in_float32
from grpo_core.model.saving import save_model
from tests.conftest import make_model, make_tokenizer
from tests.grpo_core.allocations import Allocations

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Llama": {"tie_word_embeddings": True},
    "Gemma3Text": {"head_dim": 32},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Mamba": {"state_size": 4},
}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), request.param, **ARCHITECTURES[request.param])


def _rounded(tensors: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors}


@pytest.mark.slow
def test_a_model_in_bfloat16_is_the_float32_one_rounded(folder: Path) -> None:
    whole, half = load_model(folder), load_model(folder, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert not half.training
    for named in ("named_parameters", "named_buffers"):
        found, expected = _rounded(getattr(half, named)()), _rounded(getattr(whole, named)())
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_in_float32_a_model_computes_what_a_float32_model_with_the_rounded_weights_does(folder: Path) -> None:
    half, whole = load_model(folder, dtype=torch.bfloat16), load_model(folder)
    for parameter in whole.parameters():
        parameter.data = parameter.data.bfloat16().float()
    ids = torch.arange(12)[None]
    own = [parameter.data_ptr() for parameter in half.parameters()]
    with torch.no_grad(), in_float32(half):
        found = half(input_ids=ids).logits
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, whole(input_ids=ids).logits, rtol=2e-3, atol=2e-3)  # Gemma's scale is rounded too
    assert own == [parameter.data_ptr() for parameter in half.parameters()]


def test_weights_have_their_own_precision_again_after_a_pass_that_fails(model_folder: Path) -> None:
    half = load_model(model_folder, dtype=torch.bfloat16)
    own = [parameter.data_ptr() for parameter in half.parameters()]

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    half.model.layers[-1].mlp.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError), torch.no_grad(), in_float32(half):
        half(input_ids=torch.arange(12)[None])
    assert own == [parameter.data_ptr() for parameter in half.parameters()]


def _adapter(folder: Path) -> ModelConfig:
    return ModelConfig(name_or_path=str(folder), use_peft=True, lora_r=2)


def test_an_adapter_is_drawn_in_float32_whatever_its_base_is_held_in(model_folder: Path) -> None:
    drawn = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(3)
        model = with_adapter(load_model(model_folder, dtype=dtype), _adapter(model_folder))
        assert {p.dtype for p in model.parameters() if not p.requires_grad} == {dtype}
        drawn.append(trainable_state(model))
    whole, half = drawn
    assert whole.keys() == half.keys()
    assert all(torch.equal(half[name], tensor) for name, tensor in whole.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "keys", "scaling"),
    [
        (torch.float32, {}, 32 / 2),  # lora_alpha / lora_r
        (torch.bfloat16, {"lora_dropout": 0.5}, 32 / 2),
        (torch.float32, {"use_rslora": True}, 32 / 2**0.5),
    ],
)
def test_the_model_that_is_saved_is_the_adapter_merged_into_the_float32_base(
    dtype: torch.dtype, keys: dict[str, Any], scaling: float, model_folder: Path, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    config = ModelConfig(**dict(_adapter(model_folder)) | keys)
    model = with_adapter(load_model(model_folder, dtype=dtype), config)
    for parameter in trainable_state(model).values():
        torch.nn.init.normal_(parameter, std=0.2)
    save_model(model, make_tokenizer(), tmp_path / "model", config)
    expected = load_model(model_folder).state_dict()
    changes = trainable_state(model)
    for name, tensor in changes.items():
        if "lora_A" in name:
            change = scaling * (changes[name.replace("lora_A", "lora_B")] @ tensor)
            plain = name.removeprefix("base_model.model.").replace("lora_A.default.", "")
            expected[plain] += change
    found = load_model(tmp_path / "model").state_dict()
    assert len(changes) == 2 * sum("_proj" in name for name in found if name.endswith("weight"))
    torch.testing.assert_close(found, expected)
    adapted = PeftModel.from_pretrained(load_model(model_folder), tmp_path / "adapter").merge_and_unload()
    torch.testing.assert_close(adapted.state_dict(), expected)


def _lora(folder: Path) -> Policy:
    model = with_adapter(load_model(folder, dtype=torch.bfloat16), _adapter(folder))
    return Policy(model, 1.0, max_length=4, bf16=True)


def _whole(folder: Path) -> Policy:
    return Policy(load_model(folder), 1.0, max_length=4, bf16=True)


def _reference(folder: Path) -> Policy:
    return Policy(load_model(folder, dtype=torch.bfloat16).requires_grad_(False), 1.0, max_length=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("load", "saved", "held"),
    [(_lora, torch.float32, 2), (_reference, torch.float32, 2), (_whole, torch.bfloat16, 6)],
    ids=["lora", "reference", "whole"],
)
def test_loading_takes_little_more_memory_than_what_is_held_afterwards(
    load: Callable[[Path], Policy], saved: torch.dtype, held: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No layer is a large part of the model. Saved in another precision: else the weights would stay in the file.
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 16}
    model = load_model(make_model(tmp_path / "deep", **sizes), dtype=saved)
    model.save_pretrained(tmp_path / "deep")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # in this thread, where allocations are seen
    with Allocations() as allocations:
        policy = load(tmp_path / "deep")
    assert policy.packs
    assert held * parameters <= allocations.peak <= (held + 1) * parameters  # bytes


def test_layers_that_give_or_take_more_than_a_product_of_vectors_get_no_adapter() -> None:
    llama = Llama4TextConfig(hidden_size=16, num_local_experts=4)
    for layer in (DeepseekV4GroupedLinear(16, 32, n_groups=4), Llama4Router(llama)):
        assert not _gives_product(layer)
    assert _gives_product(nn.Linear(16, 32))
