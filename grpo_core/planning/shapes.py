"""Sizes of a model, by its config.json, and of its prompts, for forecasts. Imports no torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from grpo_core.config.run import RunConfig
from grpo_core.config.teacher import loaded_teachers
from grpo_core.planning.architectures import families as architectures
from grpo_core.planning.architectures.parts import ForecastError, Linear, Part

# Models of text and images, which transformers loads for text with what sees images, or without it.
WITH_IMAGES, WITHOUT_IMAGES = ("gemma3", "qwen2_5_vl"), ("qwen3_5", "qwen3_5_moe")
TEXT_PART = dict.fromkeys(
    ("qwen2_5_vl", "qwen2_5_vl_text"), "qwen2"
)  # older checkpoints have its keys beside the tower's
UNTIED = ("nemotron_h", "kimi_linear")  # whatever their configurations say
NO_ADAPTER = ("falcon_h1", "nemotron_h", "mamba2")  # on `out_proj`, by peft
FAMILIES = (*architectures.FAMILIES, *WITH_IMAGES, *WITHOUT_IMAGES)


@dataclass(frozen=True)
class ModelShape:
    """A decoder, as parts of its layers. Sizes in elements."""

    kinds: tuple[tuple[tuple[Part, ...], int], ...]  # layers of each kind, and their number
    hidden: int
    vocabulary: int
    head: int  # size of an attention head; 0 without attention
    outside: int  # parameters that are in no layer: embedding, last norm and head; a tied head counts once
    is_tied: bool  # the head's weights are the embedding's
    float_norms: int = 0  # see `Family`
    own_logits: bool = False  # not those of a linear layer alone
    caps_logits: bool = False
    fused_experts: bool = False  # a checkpoint has all of a layer in one tensor
    refused: str = ""  # name of a linear layer that peft does not adapt, if it is asked for all

    @cached_property
    def parts(self) -> list[tuple[Part, int]]:
        """Each part of a layer, and the number of such layers."""
        return [(part, number) for layer, number in self.kinds for part in layer]

    @cached_property
    def linear(self) -> list[tuple[Linear, int]]:
        return [(each, number) for part, number in self.parts for each in part.linear]

    @cached_property
    def layers(self) -> int:
        return sum(number for _, number in self.kinds)

    @cached_property
    def parameters(self) -> int:
        return self.outside + sum(number * part.parameters for part, number in self.parts)

    @cached_property
    def active(self) -> int:
        """Parameters that a token passes: all except those of the experts that it does not take."""
        return self.outside + sum(number * part.active for part, number in self.parts)

    @cached_property
    def largest_layer(self) -> int:
        return max(sum(part.parameters for part in layer) for layer, _ in self.kinds)

    @cached_property
    def largest_parameter(self) -> int:
        """Elements of the largest tensor."""
        return max(self.hidden * self.vocabulary, *(it.inputs * it.outputs * it.copies for it, _ in self.linear))

    @cached_property
    def has_experts(self) -> bool:
        return any(it.copies > 1 for it, _ in self.linear)

    @cached_property
    def has_recurrence(self) -> bool:
        return any(part.chunk for part, _ in self.parts)

    def packs(self, longest: int) -> bool:
        """True if sequences of at most that many tokens are packed into one row, see `make_packable`."""
        parts = [part for part, _ in self.parts]
        plain = not any(part.score_bytes or (part.chunk and not part.convolved) for part in parts)
        seen = min((part.window for part in parts if part.window), default=longest)
        return plain and seen >= longest and not self.own_logits and bool(self.head)


@dataclass(frozen=True)
class PromptLengths:
    """Tokens per prompt; `how`: the source of these numbers."""

    mean: float
    longest: int
    how: str
    shown: int = 0  # of the longest that teacher.template makes of one; 0: there is no template, or it is not known


def load_shape(name_or_path: str, revision: str | None = None) -> ModelShape:
    """Read config.json of a model folder or of the local Hugging Face cache. Raises ForecastError without one."""
    path = config_file(name_or_path, revision)
    try:
        return model_shape(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        raise ForecastError(
            f"{path}: {'' if isinstance(error, ForecastError) else 'not a model config: '}{error}"
        ) from None


def load_teachers(config: RunConfig) -> dict[str, ModelShape]:
    """Sizes of the teachers that the training loads, as `load_shape` reads them, by the model's name."""
    return {it.name_or_path: load_shape(it.name_or_path, it.revision) for it in loaded_teachers(config).values()}


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
    family, text = config.get("model_type"), config.get("text_config") or config
    kind = text.get("model_type", family)
    kind = TEXT_PART.get(kind, kind)
    if family not in FAMILIES or kind not in architectures.FAMILIES:
        unknown = kind if family in FAMILIES else family
        raise ForecastError(f"model_type {unknown!r}: memory is forecast for {', '.join(FAMILIES)} only")
    own = architectures.FAMILIES[kind]
    values: dict[str, Any] = {"tie_word_embeddings": config.get("tie_word_embeddings"), **text}
    values |= {key: value for key, value in own.defaults if values.get(key) is None}
    layers = Counter(architectures.layers(kind, values))
    h, vocabulary = values["hidden_size"], values["vocab_size"]
    tied = bool(values["tie_word_embeddings"]) and kind not in UNTIED
    capped = bool(values.get("final_logit_softcapping"))
    attends = any(part.keys for layer in layers for part in layer)
    scales = (values.get(key, 1) for key in ("logits_scaling", "logit_scale", "lm_head_multiplier"))
    return ModelShape(
        kinds=tuple(layers.items()),
        hidden=h,
        vocabulary=vocabulary,
        head=(values.get("head_dim") or h // values["num_attention_heads"]) * attends,
        outside=vocabulary * h * (1 if tied else 2) + h + (_tower(config, h) if family in WITH_IMAGES else 0),
        is_tied=tied,
        float_norms=own.float_norms,
        own_logits=capped or any(scale != 1 for scale in scales),
        caps_logits=capped,
        fused_experts=kind in architectures.FUSED,
        refused="out_proj" * (family in NO_ADAPTER),
    )


def _tower(config: Mapping[str, Any], hidden: int) -> int:
    """Parameters of the image part: SigLIP, as Gemma 3 has it, or Qwen2.5-VL's tower, and of what brings its images
    into the text model."""
    c = config["vision_config"]
    h, i, patch = c["hidden_size"], c["intermediate_size"], c["patch_size"]
    if "depth" in c:
        layer = 4 * h * (h + 1) + 3 * h * i + 2 * i + h + 2 * h
        merged = h * c["spatial_merge_size"] ** 2
        images = h * 3 * c["temporal_patch_size"] * patch**2 + h
        return c["depth"] * layer + images + merged * (merged + 1) + (merged + 1) * c["out_hidden_size"]
    size = c["image_size"]
    layer = 4 * h * (h + 1) + 2 * h * i + i + h + 4 * h
    images = h * (c.get("num_channels", 3) * patch**2 + 1 + (size // patch) ** 2 + 2)
    return c["num_hidden_layers"] * layer + images + h * (hidden + 1)


def adapter_parameters(shape: ModelShape, config: RunConfig) -> int:
    """Parameters that train with a LoRA adapter: r·(in + out) for each adapted linear layer, and those of the modules
    that are trained whole.

    peft fuses the gate and up projections of each expert, with twice the rank, and adapts the router by default. Raises
    ForecastError for modules other than embedding, head and the norms of layers, and for what peft does not adapt.
    """
    names = config.model.lora_target_modules
    if shape.refused and (names is None or shape.refused in names):
        raise ForecastError(
            f"peft adapts no {shape.refused!r} of this family: name other layers in model.lora_target_modules"
        )
    each = (number * rank_of(it, config) * it.copies * (it.inputs + it.outputs) for it, number in shape.linear)
    return sum(each) + _trained_whole(shape, config)


def rank_of(layer: Linear, config: RunConfig) -> int:
    """Rank of the adapter on a linear layer; 0 if there is none."""
    names = config.model.lora_target_modules
    return config.model.lora_r * sum(names is None or name in names for name in layer.names)


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
