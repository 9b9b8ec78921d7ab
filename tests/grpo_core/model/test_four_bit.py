"""A base of 4 bits: what is trained, handed over and saved, against bitsandbytes' own dequantised weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from peft import PeftModel

from grpo_core.config.files import parse_config
from grpo_core.config.inputs import ModelConfig
from grpo_core.errors import ConfigError
from grpo_core.model.loading import (
    base_weights,
    copy_of_whole_weights,
    load_model,
    load_starting_policy,
    trainable_state,
    whole_weights,
    with_adapter,
)
from grpo_core.model.policy import Policy
from grpo_core.model.precision import in_float32
from grpo_core.model.saving import save_model
from grpo_core.model.sequences import Sequences
from grpo_core.planning.adapter import check_adapter
from grpo_core.planning.memory import frozen_bytes
from grpo_core.planning.shapes import load_shape
from tests.conftest import config_values, make_model, make_tokenizer

IDS = torch.arange(10)[None].repeat(2, 1)
SEQUENCES = Sequences(IDS, torch.tensor([4, 4]), torch.tensor([6, 5]), torch.tensor([0, 0]))
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), **SIZES)


def _config(folder: Path, **keys: Any) -> ModelConfig:
    return ModelConfig(name_or_path=str(folder), use_peft=True, lora_r=2, load_in_4bit=True, **keys)


def _quantised(folder: Path, dtype: torch.dtype = torch.float32, **keys: Any) -> Any:
    torch.manual_seed(3)
    return with_adapter(load_model(folder, dtype=dtype, in_4bit=True), _config(folder, **keys))


def _as_quantised(folder: Path, dtype: torch.dtype = torch.float32, **keys: Any) -> Any:
    """A plain model under an adapter with the weights that the 4-bit codes stand for, by bitsandbytes."""
    torch.manual_seed(3)
    return with_adapter(_dequantised(folder, dtype), _config(folder, **keys))


def _dequantised(folder: Path, dtype: torch.dtype, as_dtype: torch.dtype | None = None) -> Any:
    plain, codes = load_model(folder, dtype=as_dtype or dtype), load_model(folder, dtype=dtype, in_4bit=True)
    for name, parameter in codes.named_parameters():
        if hasattr(parameter, "quant_state"):
            parameter.quant_state.dtype = as_dtype or dtype
            plain.get_parameter(name).data = dequantize_4bit(parameter.data, parameter.quant_state)
    return plain


@torch.no_grad()
def _changed(model: Any) -> Any:
    torch.manual_seed(5)
    for parameter in trainable_state(model).values():
        parameter += 0.05 * torch.randn_like(parameter)
    return model


def _differs(folder: Path) -> Any:
    found, own = load_model(folder), _as_quantised(folder).get_base_model()
    names = {name.replace(".base_layer", ""): each for name, each in own.named_parameters() if ".lora_" not in name}
    return {name: (names[name] - each).abs().max().item() for name, each in found.named_parameters()}


@pytest.mark.slow
def test_linear_layers_are_quantised_and_embedding_head_and_norms_are_not(folder: Path) -> None:
    changed = {name for name, by in _differs(folder).items() if by}
    assert changed == {name for name in _differs(folder) if "_proj.weight" in name}


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, {"lora_modules_to_save": ["embed_tokens"]}], ids=["adapter", "and embedding"])
def test_a_4_bit_base_trains_as_the_float32_base_that_its_codes_stand_for(folder: Path, keys: dict[str, Any]) -> None:
    """Passes without a gradient come first, as in a training: they must not cost the others theirs."""
    found = []
    for model in (_quantised(folder, **keys), _as_quantised(folder, **keys)):
        policy = Policy(_changed(model), 1.0)
        assert policy.packs
        inputs = policy.prepare(SEQUENCES)
        with torch.no_grad():
            sampled = policy(inputs)[0]
            with model.disable_adapter():
                reference = policy(inputs)[0]
        logprobs, entropy = policy(inputs)
        logprobs.sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        assert all(gradient.norm() > 0 for gradient in gradients.values())
        found.append((sampled, reference, logprobs.detach(), entropy, gradients))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=1e-4)


def test_a_bf16_policy_trains_over_codes_that_are_held_once(folder: Path) -> None:
    model = _changed(_quantised(folder, torch.bfloat16))
    policy = Policy(model, 1.0, bf16=True)
    plain = _changed(_as_quantised(folder, torch.bfloat16))
    exact = Policy(plain, 1.0, bf16=True)
    pairs = [(own, each) for own, each in zip(model.parameters(), policy.model.parameters(), strict=True)]
    assert all(own is each for own, each in pairs if not own.requires_grad)
    found, expected = (each(each.prepare(SEQUENCES))[0] for each in (policy, exact))
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.05)
    found.sum().backward()
    expected.sum().backward()
    own, same = (torch.cat([p.grad.flatten() for p in each.parameters() if p.requires_grad]) for each in (model, plain))
    assert torch.nn.functional.cosine_similarity(own, same, dim=0) > 0.99


def test_a_probe_in_float32_computes_in_float32_with_bfloat16_codes(folder: Path) -> None:
    model = load_model(folder, dtype=torch.bfloat16, in_4bit=True)
    plain = _dequantised(folder, torch.bfloat16, as_dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if not hasattr(parameter, "quant_state"):
            plain.get_parameter(name).data = parameter.data.float()
    with torch.no_grad(), in_float32(model):
        found, expected = model(input_ids=IDS).logits, plain(input_ids=IDS).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    dtypes = {module.compute_dtype for module in model.modules() if hasattr(module, "compute_dtype")}
    assert dtypes == {torch.bfloat16}


def test_engines_get_the_weights_that_the_codes_stand_for(folder: Path) -> None:
    model, plain = _changed(_quantised(folder)), _changed(_as_quantised(folder))
    for weights in (lambda it: dict(whole_weights(it)), copy_of_whole_weights, base_weights):
        found, expected = weights(model), weights(plain)
        torch.testing.assert_close({**found}, {**expected}, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_that_is_saved_is_the_policy_that_was_trained(
    folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    """Merged into the base before its quantisation, it would be another one. A training that goes on with the adapter
    starts from the same."""
    model = _changed(_quantised(folder, dtype))
    save_model(model, make_tokenizer(), tmp_path / "model", _config(folder))
    saved = load_model(tmp_path / "model")
    goes_on = load_starting_policy(_config(folder, adapter=str(tmp_path / "adapter")), dtype=dtype, device="cpu")
    with torch.no_grad():
        trained, unquantised = model(input_ids=IDS).logits.float(), load_model(folder)(input_ids=IDS).logits
        found = saved(input_ids=IDS).logits, goes_on(input_ids=IDS).logits.float()
    rounding = 1e-5 if dtype == torch.float32 else 0.03  # relative
    for logits in found:
        assert (logits - trained).norm() < rounding * trained.norm()
    assert (unquantised - trained).norm() > 0.1 * trained.norm()
    base = _dequantised(folder, dtype, as_dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    torch.testing.assert_close(adapted.state_dict(), saved.state_dict(), rtol=rounding, atol=rounding)
    assert "quantization_config" not in json.loads((tmp_path / "model" / "config.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_forecast_counts_a_4_bit_base_as_it_is(tmp_path: Path, dtype: torch.dtype) -> None:
    sizes = {**SIZES, "hidden_size": 256, "intermediate_size": 1024, "vocab_size": 2048}
    folder = make_model(tmp_path / "model", **sizes)
    precision = "bf16" if dtype == torch.bfloat16 else "no"
    keys = {"use_peft": True, "load_in_4bit": True, "mixed_precision": precision}
    config = parse_config(config_values(folder, tmp_path, **keys))
    tensors = []
    for parameter in load_model(folder, dtype=dtype, in_4bit=True).parameters():
        state = getattr(parameter, "quant_state", None)
        tensors += [parameter] if state is None else [parameter, state.absmax, state.state2.absmax]
    held = sum(tensor.nbytes for tensor in tensors)
    assert frozen_bytes(config, load_shape(str(folder))) == pytest.approx(held, rel=0.01)


def test_quantised_modules_cannot_be_trained_whole(folder: Path) -> None:
    with pytest.raises(ConfigError, match="weights of 4 bits cannot be trained; name embedding, head or norms only"):
        _quantised(folder, lora_modules_to_save=["mlp"])


def test_a_base_that_bitsandbytes_cannot_quantise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = make_model(tmp_path / "experts", "Qwen3Moe", num_experts=4, num_experts_per_tok=2, head_dim=32)
    with pytest.raises(ConfigError, match="is a mixture of experts, which are single tensors"):
        check_adapter(_config(experts))
    dense = make_model(tmp_path / "dense")
    check_adapter(_config(dense))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs bitsandbytes, not installed here: pip install -e '\.\[qlora\]'"):
        check_adapter(_config(dense))
