"""Modules that are trained whole beside an adapter: tied ones stay tied, the base under them stays the reference."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from grpo_core.config.inputs import ModelConfig
from grpo_core.errors import ConfigError
from grpo_core.model.loading import (
    base_weights,
    copy_of_whole_weights,
    load_model,
    trainable_state,
    whole_weights,
    with_adapter,
)
from grpo_core.model.policy import Policy
from grpo_core.model.saving import save_model
from grpo_core.model.sequences import Sequences
from grpo_core.planning.adapter import check_adapter
from tests.conftest import make_model, make_tokenizer

IDS = torch.arange(10)[None]
SEQUENCES = Sequences(IDS, torch.tensor([4]), torch.tensor([6]), torch.tensor([0]))
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


_close = functools.partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)


def _config(folder: Path, modules: list[str], **keys: Any) -> ModelConfig:
    keys = {"lora_target_modules": ["q_proj", "gate_proj"], "lora_r": 2, **keys}
    return ModelConfig(name_or_path=str(folder), use_peft=True, lora_modules_to_save=modules, **keys)


def _changed(model: Any) -> Any:
    torch.manual_seed(5)
    for parameter in trainable_state(model).values():
        parameter += 0.1 * torch.randn_like(parameter)
    return model


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    return model(input_ids=IDS).logits


def _expected(folder: Path, model: Any, whole: set[str]) -> Any:
    """The base with the adapter's products added and the modules replaced, by hand."""
    found, state = load_model(folder), trainable_state(model)
    own = found.state_dict()
    for name, tensor in state.items():
        plain = name.removeprefix("base_model.model.")
        if "lora_A" in name:
            own[plain.replace("lora_A.default.", "")] += 32 / 2 * (state[name.replace("lora_A", "lora_B")] @ tensor)
        elif "lora_B" not in name:
            place = plain.replace("modules_to_save.default.", "")
            own[place].copy_(tensor)
            whole.remove(place)
    assert not whole, "is trained whole"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.e2e)])
@pytest.mark.parametrize(
    ("tied", "modules", "whole"),
    [
        (False, ["embed_tokens", "lm_head"], {EMBEDDING, HEAD}),
        (False, ["lm_head"], {HEAD}),
        (False, ["embed_tokens", "model.norm"], {EMBEDDING, NORM}),
        (True, ["embed_tokens", "lm_head"], {EMBEDDING}),
        (True, ["embed_tokens"], {EMBEDDING}),
        (True, ["lm_head"], {EMBEDDING}),
    ],
)
def test_what_is_trained_saved_and_handed_over_is_the_base_with_products_added_and_modules_replaced(
    tmp_path: Path, tied: bool, modules: list[str], whole: set[str], dtype: torch.dtype
) -> None:
    folder = make_model(tmp_path / "base", tie_word_embeddings=tied)
    config = _config(folder, modules)
    base = load_model(folder)
    torch.manual_seed(3)
    model = with_adapter(load_model(folder, dtype=dtype), config)
    assert {p.dtype for p in trainable_state(model).values()} == {torch.float32}
    if dtype == torch.float32:
        _close(_logits(model), _logits(base))
        policy = Policy(model, 1.0)
        before = [values.detach() for values in policy(policy.prepare(SEQUENCES))]
    _changed(model)
    expected = _expected(folder, model, set(whole))
    assert not torch.allclose(_logits(expected), _logits(base), atol=0.1)
    if dtype == torch.float32:
        _close(_logits(model), _logits(expected))
        plain = Policy(expected, 1.0)
        _close(policy(policy.prepare(SEQUENCES)), plain(plain.prepare(SEQUENCES)))
        with model.disable_adapter():
            _close([*policy(policy.prepare(SEQUENCES))], before)
        names = expected.state_dict()
        for found in (dict(whole_weights(model)), copy_of_whole_weights(model)):
            _close(found, dict(names))

    save_model(model, make_tokenizer(), tmp_path / "model", config)
    saved = load_model(tmp_path / "model")
    _close(saved.state_dict(), expected.state_dict())
    assert (saved.lm_head.weight is saved.model.embed_tokens.weight) == tied
    adapted = PeftModel.from_pretrained(load_model(folder), tmp_path / "adapter")
    _close(_logits(adapted), _logits(expected))
    again = _config(folder, modules[::-1], adapter=str(tmp_path / "adapter"))
    check_adapter(again)
    _close(_logits(with_adapter(load_model(folder), again)), _logits(expected))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_get_the_gradient_of_full_fine_tuning(tmp_path: Path, tied: bool) -> None:
    folder = make_model(tmp_path / "base", tie_word_embeddings=tied)
    gradients: list[list[Tensor]] = []
    for model in (load_model(folder), with_adapter(load_model(folder), _config(folder, ["embed_tokens", "lm_head"]))):
        policy = Policy(model, 1.0, bf16=False)
        policy(policy.prepare(SEQUENCES))[0].sum().backward()
        layers = (model.get_input_embeddings(), model.get_output_embeddings())
        gradients.append([layer.weight.grad for layer in layers])
    full, beside = gradients
    assert all(gradient.norm() > 0.1 for gradient in full)
    _close(beside, full)


def test_the_base_under_an_adapter_alone_keeps_its_names(model_folder: Path) -> None:
    config = ModelConfig(name_or_path=str(model_folder), use_peft=True)
    found = base_weights(with_adapter(load_model(model_folder), config))
    _close(found, dict(load_model(model_folder).state_dict()))


def test_a_bf16_copy_computes_with_the_float32_modules_that_are_trained(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "base", tie_word_embeddings=True)
    model = with_adapter(load_model(folder, dtype=torch.bfloat16), _config(folder, ["embed_tokens"]))
    policy = Policy(model, 1.0, bf16=True)
    policy(policy.prepare(SEQUENCES))[0].sum().backward()
    own = model.get_input_embeddings().weight
    assert (own.dtype, own.grad.dtype) == (torch.float32, torch.float32)
    assert own.grad.norm() > 0.1
    _changed(model)
    policy.refresh()
    copied = policy.model.get_output_embeddings().weight
    assert torch.equal(copied, own.bfloat16())


@pytest.mark.parametrize("targets", [None, ["q_proj", "gate_proj"]])
@pytest.mark.parametrize("module", ["mlp", "gate_proj"])
def test_a_module_that_is_trained_whole_gets_no_adapter_too(
    model_folder: Path, module: str, targets: list[str] | None
) -> None:
    names = trainable_state(
        with_adapter(load_model(model_folder), _config(model_folder, [module], lora_target_modules=targets))
    )
    whole = [name for name in names if f"{module}.modules_to_save.default" in name]
    assert len(whole) == (6 if module == "mlp" else 2)
    assert not any(f"{module}." in name for name in names.keys() - {*whole})
    assert any("q_proj.lora_A" in name for name in names)


def test_a_module_that_the_model_does_not_have_is_refused(model_folder: Path) -> None:
    config = _config(model_folder, ["lm_head", "head_of_all"])
    with pytest.raises(ConfigError, match=r"names 'head_of_all', but no module of .* has a name that ends with it"):
        with_adapter(load_model(model_folder), config)


def test_an_adapter_with_other_modules_is_refused_with_the_key_that_describes_it(
    model_folder: Path, tmp_path: Path
) -> None:
    config = _config(model_folder, ["lm_head", "embed_tokens"], lora_target_modules=["q_proj"])
    model = with_adapter(load_model(model_folder), config)
    save_model(model, make_tokenizer(), tmp_path / "model", config)
    given = config.model_copy(update={"adapter": str(tmp_path / "adapter")})
    check_adapter(given)
    for modules in (["lm_head"], None):
        other = given.model_copy(update={"lora_modules_to_save": modules})
        with pytest.raises(ConfigError, match=r'write lora_modules_to_save = \["embed_tokens", "lm_head"\]'):
            check_adapter(other)
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"modules_to_save": None}))
    with pytest.raises(ConfigError, match=r"write lora_modules_to_save = \[\]"):
        check_adapter(given)
