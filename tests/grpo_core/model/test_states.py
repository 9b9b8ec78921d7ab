"""Models with layers that carry a state, in small copies of what transformers' own configurations make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from grpo_core.model import packed_rows
from grpo_core.model.loading import load_model
from grpo_core.model.policy import Policy
from grpo_core.model.pretrained import from_config
from grpo_core.model.small_copy import small_config
from grpo_core.rollout.transformers_engine import TransformersEngine
from grpo_core.rollout.types import Request, Sampling
from tests.conftest import make_tokenizer
from tests.grpo_core.model.exactness import distance
from tests.grpo_core.model.test_models import (
    TEMPERATURE,
    _bare_rows,
    _figure,
    _gradient,
    _max_length,
    _sequences,
)
from tests.grpo_core.rollout.sampling import sampled

# What a configuration has beside its defaults, and whether its attention can be packed.
FAMILIES: dict[str, tuple[dict[str, Any], bool]] = {
    "qwen3_5_text": ({}, True),
    "qwen3_next": ({}, True),
    "olmo_hybrid": ({}, True),
    "kimi_linear": ({}, True),
    "falcon_h1": ({}, True),
    "jamba": ({}, True),
    "nemotron_h": ({}, True),
    "bamba": ({"attn_layer_indices": [1], "num_hidden_layers": 2}, True),
    "granitemoehybrid": ({"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}, True),
    "lfm2": ({"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}, True),
    "zamba2": ({}, True),
    "mamba": ({}, False),
    "mamba2": ({}, False),
    "deepseek_v3": ({}, True),  # without a state, and values narrower than keys
}


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of the family; weights are large enough for a state to show."""
    changes, _ = FAMILIES[request.param]
    made, tokenizer = tmp_path_factory.mktemp(request.param), make_tokenizer()
    config = small_config(CONFIG_MAPPING[request.param](**changes))
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    for key in {"chunk_size", "mamba_chunk_size"} & vars(config).keys():
        setattr(config, key, 8)  # tokens: shorter than sequences, and none is computed for a padding of 248
    torch.manual_seed(0)
    model = from_config(config, dtype=torch.float32)
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.1)
    model.save_pretrained(made)
    return made


def _family(request: pytest.FixtureRequest) -> str:
    return request.node.callspec.params["folder"]


@pytest.mark.slow
@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
@pytest.mark.parametrize("gradient_checkpointing", [False, True], ids=["kept", "recomputed"])
def test_log_probabilities_and_gradient_are_those_of_bare_rows(
    folder: Path, gradient_checkpointing: bool, request: pytest.FixtureRequest
) -> None:
    policy = Policy(
        load_model(folder), TEMPERATURE, max_length=_max_length(), gradient_checkpointing=gradient_checkpointing
    )
    assert policy.packs == FAMILIES[_family(request)][1], policy.why_not
    sequences = _sequences()
    sequences.prompt_of[1] = 0
    sequences.input_ids[1, :3] = sequences.input_ids[0, :3]
    logprobs, entropy = policy(policy.prepare(sequences), entropy_gradient=True)
    _figure(logprobs, entropy).backward()
    expected_logprobs, expected_entropy, expected_gradient = _bare_rows(folder, sequences, TEMPERATURE)
    assert torch.allclose(logprobs, expected_logprobs, atol=1e-4)
    assert torch.allclose(entropy, expected_entropy, atol=1e-4)
    assert distance(_gradient(policy.model), expected_gradient) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_bfloat16_packs_as_float32_does_and_differs_by_rounding(folder: Path, request: pytest.FixtureRequest) -> None:
    policy = Policy(load_model(folder), TEMPERATURE, max_length=_max_length(), bf16=True)
    assert policy.packs == FAMILIES[_family(request)][1], policy.why_not
    sequences = _sequences()
    expected, _, _ = _bare_rows(folder, sequences, TEMPERATURE)
    logprobs, _ = policy(policy.prepare(sequences))
    assert 0 < (logprobs - expected).abs().mean() < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_the_transformers_engine_samples_with_the_probabilities_of_bare_rows(folder: Path) -> None:
    """Prompts of several lengths, and one that joins."""
    engine, prompts = (
        TransformersEngine(load_model(folder), make_tokenizer(), 32),
        [[3, 5, 4], [6, 3, 3, 9, 4], [7, 8, 9]],
    )
    stream = engine.generate([Request(ids, 2, 7 + row) for row, ids in enumerate(prompts)], Sampling(12, TEMPERATURE))
    bare = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for prompt, completion in zip([ids for ids in prompts for _ in range(2)], sampled(stream), strict=True):
        with torch.no_grad():
            logits = bare(torch.tensor([prompt + completion.ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = (logits / TEMPERATURE).log_softmax(-1)[range(len(completion.ids)), completion.ids]
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-3)


@pytest.mark.parametrize("folder", ["qwen3_5_text"], indirect=True)
def test_a_state_that_would_run_on_into_the_next_sequence_is_seen(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_one(_rows: Any, own: Any, hidden_states: Any, *further: Any, **keys: Any) -> Any:
        return own(hidden_states, *further, **keys)

    monkeypatch.setattr(packed_rows, "_by_rows", as_one)
    policy = Policy(load_model(folder), TEMPERATURE, max_length=_max_length())
    assert not policy.packs
    assert "hidden states differ from a plain pass's" in policy.why_not
