"""Sizes of a model, by its config.json, and of its prompts, for forecasts. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_core.config.run import RunConfig

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


class ForecastError(ValueError):
    """A quantity that cannot be forecast; the message says why."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of one MLP."""

    layers: int  # that have it
    number: int  # experts per layer
    taken: int  # by a token
    intermediate: int  # of one expert


@dataclass(frozen=True)
class ModelShape:
    """A decoder of the Llama family: grouped-query attention, gated MLP or a mixture of such. Sizes in elements."""

    layers: int
    hidden: int
    heads: int  # query heads
    attention: int  # query heads · head size
    key_value: int  # key-value heads · head size
    intermediate: int  # of the MLP
    vocabulary: int
    parameters: int
    outside: int  # parameters that are in no layer: embedding, last norm and head; a tied head counts once
    largest_layer: int  # its parameters
    normed_heads: bool = False  # queries and keys have norms of their own
    experts: Experts = Experts(0, 0, 0, 0)

    @property
    def widest(self) -> int:
        """Intermediate size that a token passes in one layer: of an MLP, or of all experts that it takes."""
        plain = self.intermediate if self.experts.layers < self.layers else 0
        return max(plain, self.experts.taken * self.experts.intermediate)

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest tensor: embedding, a projection, or the fused gates of a layer's experts."""
        plain = self.intermediate if self.experts.layers < self.layers else 0
        widths = (self.vocabulary, self.attention, plain, 2 * self.experts.number * self.experts.intermediate)
        return self.hidden * max(widths)

    @property
    def is_tied(self) -> bool:
        """True if the head's weights are the embedding's."""
        return self.outside < 2 * self.vocabulary * self.hidden

    @property
    def active(self) -> int:
        """Parameters that a token passes: all except those of the experts that it does not take."""
        it = self.experts
        return self.parameters - it.layers * (it.number - it.taken) * 3 * self.hidden * it.intermediate


@dataclass(frozen=True)
class PromptLengths:
    """Tokens per prompt; `how`: the source of these numbers."""

    mean: float
    longest: int
    how: str


def load_shape(name_or_path: str, revision: str | None = None) -> ModelShape:
    """Read config.json of a model folder or of the local Hugging Face cache. Raises ForecastError without one."""
    path = config_file(name_or_path, revision)
    try:
        return model_shape(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        raise ForecastError(
            f"{path}: {'' if isinstance(error, ForecastError) else 'not a model config: '}{error}"
        ) from None


def load_positions(name_or_path: str, revision: str | None = None) -> int | None:
    """Number of positions of a model, by its config.json; None if that does not say, or is not on this machine."""
    try:
        values = json.loads(config_file(name_or_path, revision).read_text())
        positions = values.get("text_config", values).get("max_position_embeddings")
    except (ValueError, AttributeError):
        return None
    return positions if isinstance(positions, int) else None


def config_file(name_or_path: str, revision: str | None, name: str = "config.json") -> Path:
    """The file of this name of a model folder or of the local Hugging Face cache. Raises ForecastError without one."""
    path = Path(name_or_path) / name
    if path.is_file():
        return path
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name_or_path, name, revision=revision)
    except ValueError:  # a path, not a hub name
        cached = None
    if not isinstance(cached, str):
        raise ForecastError(f"model {name_or_path!r}: no such folder with a {name}, and none in the Hugging Face cache")
    return Path(cached)


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Sizes of a model from its config.json. Raises ForecastError for families whose parameters are not known here."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ForecastError(f"model_type {family!r}: memory is forecast for {', '.join(FAMILIES)} only")
    h, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    size = config.get("head_dim") or h // heads
    q, kv = heads * size, (config.get("num_key_value_heads") or heads) * size
    intermediate, vocabulary = config["intermediate_size"], config["vocab_size"]
    biased = family == "qwen2" or config.get("attention_bias", False)
    attention = 2 * h * q + 2 * h * kv + (q + 2 * kv) * biased + h * (biased and family != "qwen2")
    normed = family.startswith("qwen3")
    attention += 2 * size * normed
    mlp = 3 * h * intermediate + (2 * intermediate + h) * config.get("mlp_bias", False)
    outside = vocabulary * h * (1 if config.get("tie_word_embeddings", False) else 2) + h
    experts = _experts(config) if family == "qwen3_moe" else Experts(0, 0, 0, 0)
    mixture = experts.number * (3 * h * experts.intermediate + h)  # with the router
    mlps = [mlp] * (layers - experts.layers) + [mixture] * experts.layers
    return ModelShape(
        layers=layers,
        hidden=h,
        heads=heads,
        attention=q,
        key_value=kv,
        intermediate=intermediate,
        vocabulary=vocabulary,
        parameters=outside + layers * (attention + 2 * h) + sum(mlps),
        outside=outside,
        largest_layer=attention + 2 * h + max(mlps),
        normed_heads=normed,
        experts=experts,
    )


def _experts(config: Mapping[str, Any]) -> Experts:
    """The mixtures of a Qwen3 MoE; its other layers have one MLP."""
    plain, every = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step") or 1
    number = config["num_experts" if "num_experts" in config else "num_local_experts"]  # of transformers 4, and 5
    layers = range(config["num_hidden_layers"]) if number else ()
    mixtures = [it for it in layers if it not in plain and (it + 1) % every == 0]
    return Experts(len(mixtures), number, config["num_experts_per_tok"], config["moe_intermediate_size"])


def adapter_parameters(shape: ModelShape, config: RunConfig) -> int:
    """Parameters that train with a LoRA adapter: r·(in + out) for each adapted linear layer, and those of the modules
    that are trained whole.

    peft fuses the gate and up projections of each expert, with twice the rank, and adapts the router by default. Raises
    ForecastError for modules other than embedding, head and the norms of layers.
    """
    h, q, kv, i, experts = shape.hidden, shape.attention, shape.key_value, shape.intermediate, shape.experts
    each, plain, mixed = shape.layers, shape.layers - experts.layers, experts.layers * experts.number
    sizes = {"q_proj": each * (h + q), "k_proj": each * (h + kv), "v_proj": each * (h + kv), "o_proj": each * (q + h)}
    sizes |= dict.fromkeys(("gate_proj", "up_proj"), plain * (h + i) + mixed * (h + 2 * experts.intermediate))
    sizes |= {"down_proj": plain * (i + h) + mixed * (experts.intermediate + h)}
    sizes |= {"gate": experts.layers * (h + experts.number)}
    adapted = config.model.lora_target_modules or list(sizes)
    return config.model.lora_r * sum(sizes.get(name, 0) for name in adapted) + _trained_whole(shape, config)


def trains_head(shape: ModelShape, config: RunConfig) -> bool:
    """True if the head is trained: in full fine-tuning, or beside an adapter, by its or a tied embedding's name."""
    names = {"lm_head", "embed_tokens"} if shape.is_tied else {"lm_head"}
    wanted = config.model.lora_modules_to_save or []
    return not config.model.use_peft or any(name.endswith(each) for name in names for each in wanted)


def _trained_whole(shape: ModelShape, config: RunConfig) -> int:
    """Parameters of the modules that are trained whole beside an adapter."""
    embedding, norms = shape.vocabulary * shape.hidden, shape.layers * shape.hidden
    sizes = {"model.embed_tokens": embedding, "lm_head": embedding, "model.norm": shape.hidden}
    sizes |= {"input_layernorm": norms, "post_attention_layernorm": norms}
    wanted = config.model.lora_modules_to_save or []
    if others := [each for each in wanted if not any(name.endswith(each) for name in sizes)]:
        raise ForecastError(
            f"model.lora_modules_to_save names {others[0]!r}: what trains is counted for embed_tokens, lm_head and the "
            "norms of layers only"
        )
    found = {name for name in sizes if any(name.endswith(each) for each in wanted)}
    if shape.is_tied and found >= {"model.embed_tokens", "lm_head"}:
        found.remove("lm_head")
    return sum(sizes[name] for name in found)


def adapted_inputs(shape: ModelShape, config: RunConfig) -> dict[str, int]:
    """Elements per token that go into each adapter of a layer, by the name of the linear layer outside experts."""
    h, mlp = shape.hidden, shape.experts.layers < shape.layers
    sizes = dict.fromkeys(("q_proj", "k_proj", "v_proj"), h) | {"o_proj": shape.attention}
    sizes |= {"gate_proj": h, "up_proj": h, "down_proj": shape.intermediate} if mlp else {}
    return {name: sizes[name] for name in config.model.lora_target_modules or sizes if name in sizes}
