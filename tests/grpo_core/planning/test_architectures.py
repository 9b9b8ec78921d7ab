"""Sizes of models of each family, and what their passes keep, against transformers' models, peft's adapters and
torch's counts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache

from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.model import policy as policies
from grpo_core.model.capabilities import make_packable, plain_output_layer
from grpo_core.model.loading import with_adapter
from grpo_core.model.packed_attention import PackedBatch
from grpo_core.model.packed_attention import _Varlen as _Sequences
from grpo_core.model.pretrained import without_weights
from grpo_core.model.sequences import Sequences
from grpo_core.planning.architectures.families import FAMILIES as ARCHITECTURES
from grpo_core.planning.hardware import Gpu
from grpo_core.planning.memory import cache_bytes, peak_memory, training_parts
from grpo_core.planning.passes import Pass, activations, planned_pass
from grpo_core.planning.remedies import remedies
from grpo_core.planning.shapes import FAMILIES, ForecastError, adapter_parameters, model_shape
from tests.conftest import config_values
from tests.grpo_core.allocations import Allocations
from tests.grpo_core.planning.small_models import MODELS, small_config
from tests.grpo_core.planning.test_forecast import config_with, plan_of
from tests.grpo_core.planning.test_passes import LENGTHS, gpu_kernels
from tests.qwen import planned

__all__ = ["gpu_kernels"]
# In bfloat16 these do not run: their layers, or their logits, have other precisions than their inputs.
FLOAT32 = ("nemotron_h", "mamba2", "minimax")
OWN_CACHE = ("mamba2", "minimax")  # which no other code can measure


def _parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _short_config(family: str, **changes: Any) -> Any:
    """Its small configuration with one layer of each kind, or two of one: recurrences take long."""
    kinds = [*dict.fromkeys(MODELS[family].get("layer_types", ()))]
    short = {"num_hidden_layers": 2} | ({"layer_types": kinds} if kinds else {})
    own = {"bamba": {"attn_layer_indices": [1]}, "nemotron_h": {"num_hidden_layers": 4}}.get(family, {})
    return small_config(family, **short | own | changes)


def _model(config: Any, **options: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **options)


def test_every_family_is_held_against_its_model() -> None:
    assert {*FAMILIES} == {*MODELS, "qwen3_5", "qwen3_5_moe", "gemma3", "qwen2_5_vl"}


BIASES = ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias", "conv_bias", "projectors_bias", "qkv_bias")


@pytest.mark.parametrize("other", [False, True], ids=["untied", "tied, other biases"])
@pytest.mark.parametrize("family", MODELS)
def test_parameters_are_those_of_transformers_model(family: str, other: bool) -> None:
    default = small_config(family)
    changes = {key: not getattr(default, key) for key in BIASES if other and hasattr(default, key)}
    config = small_config(family, tie_word_embeddings=other, **changes)
    model = _model(config)
    layers = [_parameters(layer) for layer in model.get_decoder().layers]
    shape = model_shape(config.to_dict())
    found = shape.parameters, shape.outside, shape.largest_layer
    assert found == (_parameters(model), _parameters(model) - sum(layers), max(layers))
    assert shape.largest_parameter == max(parameter.numel() for parameter in model.parameters())
    number, taken = (getattr(config, key, 1) for key in ("num_local_experts", "num_experts_per_tok"))
    number = getattr(config, "num_experts", getattr(config, "n_routed_experts", number))
    passed = {name: p.numel() * (taken / number if ".experts." in name else 1) for name, p in model.named_parameters()}
    assert shape.active == sum(passed.values())


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3_5", "qwen3_5_text"),
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        ("gemma3", "gemma3_text"),
        ("qwen2_5_vl", "qwen2"),
    ],
)
def test_a_model_of_text_and_images_has_what_is_loaded_for_text(family: str, text: str) -> None:
    config = CONFIG_MAPPING[family](text_config=small_config(text).to_dict())
    if family == "gemma3":
        images = {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "vision_use_head": False}
        config = CONFIG_MAPPING[family](text_config=small_config(text).to_dict(), vision_config=images)
    if family == "qwen2_5_vl":
        images = {"hidden_size": 64, "intermediate_size": 72, "depth": 3, "num_heads": 4, "out_hidden_size": 256}
        written = {key: it for key, it in small_config(text).to_dict().items() if key != "model_type"}
        config = CONFIG_MAPPING[family](text_config=written, vision_config=images)
        older = written | {"model_type": family, "vision_config": config.vision_config.to_dict()}
        assert model_shape(older) == model_shape(config.to_dict())
    assert model_shape(config.to_dict()).parameters == _parameters(without_weights(config))


@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("qwen3_next", {"full_attention_interval": 2}),
        ("gemma3_text", {"sliding_window_pattern": 4}),
        ("nemotron_h", {"hybrid_override_pattern": "M-*E", "layers_block_type": None}),
        ("lfm2", {"full_attn_idxs": [1], "block_ff_dim": 300}),
        ("kimi_linear", {"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3, 4], "head_dim": 24}}),
    ],
)
def test_keys_of_older_checkpoints_mean_the_same_layers(family: str, own: dict[str, Any]) -> None:
    """transformers turns them into its own; a forecast reads the file as it is."""
    config = small_config(family, layer_types=None, **own)
    kinds = ("layer_types", "layers_block_type")
    written = {key: value for key, value in small_config(family).to_dict().items() if key not in kinds}
    shape = model_shape({**written, **{key: value for key, value in own.items() if value is not None}})
    assert shape == model_shape(config.to_dict())
    assert shape.parameters == _parameters(_model(config))


@pytest.mark.parametrize("family", [family for family, it in ARCHITECTURES.items() if it.defaults])
def test_keys_that_checkpoints_leave_out_have_the_values_of_their_class(family: str) -> None:
    whole = CONFIG_MAPPING[family]().to_dict()
    left_out = dict(ARCHITECTURES[family].defaults)
    assert {key: whole[key] for key in left_out} == left_out
    assert model_shape({key: whole[key] for key in whole if key not in left_out}) == model_shape(whole)


def test_families_that_are_not_known_are_not_guessed() -> None:
    with pytest.raises(ForecastError, match=r"model_type 'mistral3': memory is forecast for llama, .* only"):
        model_shape({"model_type": "mistral3", "text_config": small_config("mistral").to_dict()})
    for kind in ("chunked_attention", "linear_attention"):
        with pytest.raises(ForecastError, match=f"layers of the kind '{kind}' are not known in this family"):
            model_shape(small_config("llama").to_dict() | {"layer_types": ["full_attention", kind]})
    with pytest.raises(ForecastError, match="moe_latent_size: experts between narrower layers are not known"):
        model_shape(small_config("nemotron_h").to_dict() | {"moe_latent_size": 32})


@pytest.mark.parametrize(
    ("family", "sizes", "billions", "active"),
    [
        ("gpt_oss", {}, 116.8, 5.1),
        ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}, 20.9, 3.6),
        ("deepseek_v3", {}, 671.0, 37),
    ],
)
def test_large_mixtures_have_the_parameters_of_their_model_cards(
    family: str, sizes: dict[str, Any], billions: float, active: float
) -> None:
    """Active ones there are without the embedding."""
    shape = model_shape(CONFIG_MAPPING[family](**sizes).to_dict())
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert (shape.active - shape.vocabulary * shape.hidden) / 1e9 == pytest.approx(active, rel=0.04)


@dataclass(frozen=True)
class Sampled:
    """What torch counts of 67 tokens that are sampled, of which a window has 24: operations per token of the first 64,
    and bytes of the cache at the end."""

    config: Any
    operations: float
    cached: int


@functools.cache
def _sampled(family: str) -> Sampled:
    windowed = {"sliding_window": 24} if hasattr(small_config(family), "sliding_window") else {}
    config, counter = _short_config(family, **windowed), FlopCounterMode(display=False)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    cache = None if family in OWN_CACHE else DynamicCache(config=config)
    ids = torch.arange(67)[None]
    with torch.no_grad():
        with counter:
            model(input_ids=ids[:, :64], past_key_values=cache, use_cache=cache is not None)
        for token in (64, 65, 66) if cache else ():
            model(input_ids=ids[:, token : token + 1], past_key_values=cache, use_cache=True)
    counts = counter.get_flop_counts()["Global"]
    products = sum(count for name, count in counts.items() if str(name) in ("aten.mm", "aten.addmm"))
    held = {
        it.data_ptr(): it.untyped_storage().nbytes()
        for layer in (cache or DynamicCache()).layers
        for it in _tensors(layer)
    }
    return Sampled(config, products / 64, sum(held.values()))


@pytest.mark.parametrize("family", MODELS)
def test_a_token_takes_two_operations_per_parameter_that_it_passes(family: str) -> None:
    """In linear layers, experts and the head: an embedding is looked up, and recurrences are not counted."""
    found = _sampled(family)
    shape = model_shape(found.config.to_dict())
    passed = shape.active - shape.vocabulary * shape.hidden * (not shape.is_tied)
    assert found.operations == pytest.approx(2 * passed, rel=0.04)


@pytest.mark.parametrize("family", [family for family in MODELS if family not in OWN_CACHE])
def test_sampling_keeps_keys_values_and_states_as_transformers_cache_does(family: str) -> None:
    found = _sampled(family)
    assert cache_bytes(config_with(mixed_precision="no"), model_shape(found.config.to_dict()), 67) == found.cached


def _tensors(it: Any) -> Iterator[torch.Tensor]:
    if isinstance(it, torch.Tensor):
        yield from [it] if it.is_floating_point() and it.numel() else []
    else:
        inner = it if isinstance(it, list | tuple) else it.values() if isinstance(it, dict) else vars(it).values()
        for each in inner:
            if isinstance(each, torch.Tensor | list | tuple | dict):
                yield from _tensors(each)


TARGETS = [None, ["q_proj", "down_proj", "in_proj", "in_proj_qkv", "kv_b_proj", "o_proj"]]


@pytest.mark.parametrize("targets", TARGETS, ids=["all-linear", "named"])
@pytest.mark.parametrize("family", MODELS)
def test_adapter_parameters_are_those_of_peft_s_adapter(family: str, targets: list[str] | None) -> None:
    """peft refuses all linear layers of three families. None has all of the named ones."""
    keys = {"use_peft": True, "lora_r": 4} | ({"lora_target_modules": targets} if targets else {})
    config = parse_config(config_values(Path("model"), Path("data"), **keys))
    small = _short_config(family)
    model, shape = _model(small), model_shape(small.to_dict())
    try:
        adapted = with_adapter(model, config.model)
    except ValueError as error:
        assert "'out_proj' is incompatible" in str(error)
        with pytest.raises(ForecastError, match="peft adapts no 'out_proj' of this family"):
            adapter_parameters(shape, config)
        return
    found = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert adapter_parameters(shape, config) == found


@pytest.mark.parametrize("limit", [None, 20_000])
def test_an_adapter_that_peft_refuses_is_no_remedy_and_hides_no_forecast(limit: int | None) -> None:
    config = config_with(mixed_precision="bf16", engine="vllm-server", max_tokens_per_pass=limit)
    run = planned(config, model_shape(CONFIG_MAPPING["falcon_h1"]().to_dict()), LENGTHS, Gpu("GPU", 80))
    assert "; recurrences as transformers computes them in Python, of which kernels" in peak_memory(run)["how"]
    changes = [remedy["changes"] for remedy in remedies(run)]
    assert changes and not any("model.use_peft" in each for each in changes)


def test_rows_that_cannot_be_packed_have_their_prompt_each() -> None:
    """And recurrences see such rows in any case: 8 completions of 512 tokens after 220."""
    config = config_with(mixed_precision="bf16", max_completion_length=512, num_generations=8)
    packed, padded = (
        planned_pass(config, plan_of(config), LENGTHS, model_shape(small_config(family, **changes).to_dict()))
        for family, changes in (("qwen3_5_text", {}), ("gemma3_text", {"sliding_window": 16}))
    )
    assert packed.tokens == padded.tokens == padded.keys == padded.in_rows
    assert padded.completions / padded.tokens == pytest.approx(512 / 732)
    assert packed.keys == packed.in_rows + packed.tokens - packed.completions
    assert packed.in_rows / packed.tokens == pytest.approx(8 * 732 / (220 + 8 * 512))


ROWS, GROUP, PROMPT, COMPLETION = 4, 2, 31, 33  # which fill the chunks of recurrences


@pytest.mark.parametrize("family", MODELS)
def test_a_pass_keeps_and_takes_what_torch_counts(
    gpu_kernels: None, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    kept, told, peak, worst = _counted(monkeypatch, family, {})
    assert kept == pytest.approx(told, rel=0.1)
    assert 0.8 <= peak / worst <= 1.1


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma3_text", {"sliding_window": 16}),
        ("exaone4", {"sliding_window": 16}),
        ("gpt_oss", {"sliding_window": 16}),
        ("cohere2", {"sliding_window": 16, "vocab_size": 3000}),
        ("gemma2", {"sliding_window": 16, "vocab_size": 3000}),
        ("granite", {"logits_scaling": 8.0, "vocab_size": 3000}),
        ("falcon_h1", {"lm_head_multiplier": 0.5, "vocab_size": 3000}),
    ],
)
def test_what_cannot_be_packed_keeps_what_torch_counts(
    gpu_kernels: None, monkeypatch: pytest.MonkeyPatch, family: str, changes: dict[str, Any]
) -> None:
    """Windows that sequences exceed, and logits of their own over a large vocabulary."""
    kept, told, peak, worst = _counted(monkeypatch, family, changes)
    assert kept == pytest.approx(told, rel=0.1)
    assert 0.8 <= peak / worst <= 1.1


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen2_moe", "gpt_oss", "qwen3_5_text", "bamba", "phi3"])
def test_under_an_adapter_a_pass_keeps_what_torch_counts(
    gpu_kernels: None, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Where peft adapts experts, it keeps all of their weights with the adapter's change."""
    kept, told, _, _ = _counted(monkeypatch, family, {}, use_peft=True, lora_r=4)
    assert kept == pytest.approx(told, rel=0.1)


def _counted(
    monkeypatch: pytest.MonkeyPatch, family: str, changes: dict[str, Any], **keys: Any
) -> tuple[float, float, float, float]:
    """Bytes that a pass keeps and takes in all, each as torch counts it and as it is forecast. Packed where it can be,
    by what is tried on this machine."""
    small = _short_config(family, **changes)
    config = config_with(mixed_precision="no" if family in FLOAT32 else "bf16", **keys)

    def packable(model: Any, *_: Any, max_length: float) -> tuple[Any, str]:
        found, why = make_packable(model, ["padded"], max_length=max_length)
        return found and "varlen", why

    monkeypatch.setattr(policies, "make_packable", packable)
    monkeypatch.setattr(policies, "plain_output_layer", plain_output_layer)
    policy, allocations, rows = _policy(small, config), Allocations(), torch.arange(ROWS)
    ids = torch.arange(ROWS * (PROMPT + COMPLETION)).view(ROWS, -1) % 199
    lengths = torch.full_like(rows, PROMPT), torch.full_like(rows, COMPLETION)
    inputs = policy.prepare(Sequences(ids, *lengths, rows // GROUP))
    with allocations, policy.dropout():
        chosen, _ = policy(inputs)
        kept = allocations.now()
        chosen.sum().backward()

    shape, tokens = model_shape(small.to_dict()), inputs.tokens
    assert shape.packs(PROMPT + COMPLETION) == policy.packs
    assert shape.own_logits == (policy.output_layer is None)
    assert shape.has_recurrence == policy.with_rows or not policy.packs
    number, keyed, longest = tokens.input_ids.numel(), tokens.input_ids.numel(), PROMPT + COMPLETION
    if isinstance(tokens, PackedBatch):  # without the last token of a completion
        assert isinstance(tokens.attention, _Sequences)
        keyed, longest = len(tokens.attention.keys), longest - 1
    size = Pass(number, keyed, len(tokens.predicts), alone=True, rows=ROWS, longest=longest)
    worst = sum(training_parts(planned(config, shape, LENGTHS, Gpu("GPU")), size).values())
    return kept, activations(config, shape, size).kept, allocations.peak, worst


def _policy(small: Any, config: RunConfig) -> policies.Policy:
    torch.manual_seed(0)
    capped = {"attn_implementation": "eager"} if getattr(small, "attn_logit_softcapping", None) else {}
    dtype = torch.bfloat16 if config.model.use_peft else torch.float32
    model = with_adapter(AutoModelForCausalLM.from_config(small, dtype=dtype, **capped).eval(), config.model)
    bf16 = config.train.mixed_precision == "bf16"
    return policies.Policy(model, 1.0, bf16=bf16, max_length=PROMPT + COMPLETION)
