"""Logits of models in bfloat16 are the float32 products of their states and head, however a model makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo_core.config.inputs import ModelConfig
from grpo_core.model import loading, logprobs
from grpo_core.model.loading import load_model, with_adapter
from grpo_core.model.logprobs import Float32Logits, divergence, gives_float32_logits
from grpo_core.model.policy import Policy
from grpo_core.model.precision import working_copy
from grpo_core.rollout.transformers_engine import TransformersEngine
from grpo_core.rollout.types import Request, Sampling
from grpo_core.training.session import load_session
from tests.conftest import make_model, make_run, make_tokenizer
from tests.grpo_core.model.exactness import distance
from tests.grpo_core.model.test_models import MODELS, _sequences
from tests.grpo_core.rollout.sampling import sampled

IDS = torch.tensor([[3, 4, 5, 6, 7, 8]])
HEADS = {
    "plain": ("Qwen2", {}),
    "tied": ("Qwen2", {"tie_word_embeddings": True}),
    "capped": ("Gemma2", {"head_dim": 32, "final_logit_softcapping": 5.0}),
    **{name: MODELS[name][:2] for name in ("scaled logits", "head with a bias")},
}


def _head(model: Any) -> Any:
    return getattr(model.get_output_embeddings(), "base_layer", model.get_output_embeddings())


def _away(model: Any) -> float:
    """How far what the model computes after its last state is from the same in float64; relative."""
    kept: list[Tensor] = []
    hook = _head(model).register_forward_pre_hook(lambda _, given: kept.append(given[0]))
    logits = model(input_ids=IDS).logits
    hook.remove()
    assert logits.dtype == torch.float32
    layer = _head(model)
    weight = layer.weight.double()
    exact = kept[0].double() @ weight.T + (0 if layer.bias is None else layer.bias.double())
    config = model.config
    exact = exact / (getattr(config, "logits_scaling", None) or 1.0)
    if cap := getattr(config, "final_logit_softcapping", None):
        exact = cap * torch.tanh(exact / cap)
    return float((logits - exact).norm() / exact.norm())


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("copied", [False, True], ids=["loaded in bfloat16", "copied"])
@torch.no_grad()
def test_a_model_s_own_logits_are_not_rounded(name: str, copied: bool, tmp_path: Path) -> None:
    folder = make_model(tmp_path, HEADS[name][0], **HEADS[name][1])
    model = working_copy(load_model(folder)) if copied else load_model(folder, dtype=torch.bfloat16)
    assert gives_float32_logits(model)
    assert _away(model) < 1e-6
    plain = load_model(folder, dtype=torch.bfloat16)
    plain.get_output_embeddings().__class__ = nn.Linear
    assert not gives_float32_logits(plain)
    assert plain(input_ids=IDS).logits.dtype == torch.bfloat16


@torch.no_grad()
def test_under_an_adapter_of_the_head_logits_are_float32(model_folder: Path) -> None:
    keys: dict[str, Any] = {"name_or_path": str(model_folder), "use_peft": True, "lora_r": 2}
    for more in ({"lora_target_modules": ["q_proj", "lm_head"]}, {"lora_modules_to_save": ["lm_head"]}):
        adapted = with_adapter(load_model(model_folder, dtype=torch.bfloat16), ModelConfig(**keys, **more))
        model = working_copy(adapted)
        assert gives_float32_logits(model)
        assert model(input_ids=IDS).logits.dtype == torch.float32


@pytest.mark.parametrize("bias", [False, True])
def test_the_gradients_of_a_float32_head_are_rounded_once(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "CAST", 100)  # in several parts
    torch.manual_seed(0)
    head, weights = nn.Linear(16, 30, bias=bias), torch.randn(3, 4, 30)
    exact, states = nn.Linear(16, 30, bias=bias).double(), torch.randn(3, 4, 16).bfloat16()
    head.bfloat16().__class__ = Float32Logits
    exact.load_state_dict(head.state_dict())
    given = [states.clone().requires_grad_(), states.double().requires_grad_()]
    found = [layer(x) for layer, x in zip((head, exact), given, strict=True)]
    assert torch.allclose(found[0].double(), found[1], atol=1e-5)
    for logits in found:
        (logits * weights).sum().backward()
    gradients = [[x.grad, *(p.grad for p in layer.parameters())] for x, layer in zip(given, (head, exact), strict=True)]
    assert distance(*gradients) < 4e-3  # type: ignore[arg-type]


@pytest.fixture
def engine(model_folder: Path) -> TransformersEngine:
    return TransformersEngine(load_model(model_folder, dtype=torch.bfloat16), make_tokenizer())


@torch.no_grad()
def test_where_states_are_the_same_an_engine_in_bfloat16_scores_as_the_policy_does(engine: TransformersEngine) -> None:
    sequences, policy = _sequences(), Policy(engine.model, 1.0)
    policy.packs = False
    found, _ = policy(policy.prepare(sequences))
    rows = [ids[:length].tolist() for ids, length in zip(sequences.input_ids, sequences.lengths, strict=True)]
    for row, prompt, scored in zip(found, sequences.prompt_lengths, engine.compute_logprobs(rows), strict=True):
        expected = torch.tensor(scored[prompt - 1 :])
        assert (row[: len(expected)] - expected).abs().max() < 1e-5


@pytest.mark.parametrize("shared", [True, False], ids=["shared cache", "plain cache"])
@torch.no_grad()
def test_sampled_log_probabilities_follow_exactly_from_the_states(engine: TransformersEngine, shared: bool) -> None:
    head, states = engine.model.get_output_embeddings(), list[Tensor]()
    engine.shares_cache = shared
    head.register_forward_pre_hook(lambda _, given: states.append(given[0].reshape(-1).double()))
    (drawn,) = sampled(engine.generate([Request(IDS[0].tolist(), 1, 0)], Sampling(8, 1.0, 1.0)))
    exact = (torch.stack(states)[: len(drawn.ids)] @ head.weight.double().T).log_softmax(-1)
    expected = exact.gather(1, torch.tensor(drawn.ids)[:, None])[:, 0]
    assert (torch.tensor(drawn.logprobs).double() - expected).abs().max() < 1e-5


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_a_training_says_that_logits_are_rounded(
    precision: str, values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(loading, "make_logits_float32", lambda _: None)
    values["train"]["mixed_precision"] = precision
    load_session(make_run(tmp_path / "run", values))
    assert ("logits are rounded to bfloat16" in capfd.readouterr().out) == (precision == "bf16")


@pytest.mark.parametrize("chunk", [3, 100])
def test_the_divergence_of_models_in_bfloat16_follows_exactly_from_their_states(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "chunk_tokens", lambda *_: chunk)
    torch.manual_seed(0)
    p, q = ((torch.randn(7, width).bfloat16(), torch.randn(40, width).bfloat16()) for width in (16, 24))
    exact = [torch.distributions.Categorical(logits=states.double() @ weight.double().T) for states, weight in (p, q)]
    expected = torch.distributions.kl_divergence(*exact)
    assert torch.allclose(divergence(*p, *q).double(), expected, rtol=1e-5)
