"""A small copy of a model: its architecture with a narrow layer of each kind, and random weights, to try things on."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from grpo_core.model.pretrained import from_config, from_pretrained, without_weights

LAYERS, VOCABULARY = 8, 512  # at most
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
# Keys by which layers differ, beside lists with a value for each: numbers of the first ones and of the last, lists of
# layers, and periods, of which it is one layer, by an offset or the last.
FIRST, LAST = ("first_k_dense_replace", "num_dense_layers"), "num_kv_shared_layers"
LISTED = ("moe_layers", "mlp_only_layers", "cross_attention_layers", "attn_layer_indices", "hybrid_layer_ids")
PERIODS = ("attn_layer_period", "expert_layer_period", "decoder_sparse_step", "moe_layer_interval")
MOST = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 32),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "pad_token_id": VOCABULARY - 1,  # an embedding has its row
}
NARROWEST = 2  # width of a head: a rotary embedding turns pairs
ALIGNED = 8  # of an expert's width: products of many experts at once want multiples of 16 bytes
HEADLESS = 32  # parts that the width of a model without attention heads is taken to have
OF_MODEL = ("hidden_size", "n_embd", "d_model", "embed_dim", "emb_dim")
OF_HEAD = ("head_dim", "rotary_dim", "qk_rope_head_dim", "dim_head", "kv_channels")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
WIDTH = re.compile(
    r"(?!mamba_d_head)(.*_)?(hidden_size|head_dim|d_head|lora_rank|ffn_dim|n_inner|dim_ff)(_.*)?"
    r"|mamba_(n_heads|d_ssm|headdim)"  # the state's width is heads times their size, of which one is made smaller
)


def write_small_copy(path: Path | str, revision: str | None, folder: Path, limit: int) -> None:
    """Write a small copy of the model at `path` to `folder`, with the same generation_config.json. Raises ValueError if
    its weights take more than `limit` bytes, and what transformers raises for an architecture that cannot be made
    small."""
    config = small_config(from_pretrained(AutoConfig, path, revision))
    shape = without_weights(config)
    size = sum(weights.numel() for weights in shape.state_dict().values()) * torch.float32.itemsize
    if size > limit:
        raise ValueError(f"a small copy takes {size:,} bytes, and {limit:,} are the most")
    model = from_config(config, dtype=torch.float32)
    if model.config.model_type != config.model_type:  # its text model alone
        model = from_config(config, with_images=True, dtype=torch.float32)
    model.generation_config = GenerationConfig()
    model.save_pretrained(folder)
    try:
        generation = from_pretrained(GenerationConfig, path, revision)
    except OSError:  # the model has none
        return
    (folder / GENERATION_CONFIG_NAME).write_text(json.dumps(generation.to_diff_dict(), default=str))


def small_config(config: Any) -> Any:
    """Copy of a configuration with few layers and experts, and as narrow as its architecture takes it. Raises what
    transformers raises for one that it does not take."""
    for factor in _factors(config):
        small = copy.deepcopy(config)
        for part in _parts(small):
            _make_small(part, factor)
        try:
            without_weights(type(small).from_dict(small.to_dict()))  # which checks more than changing it does
        except Exception:  # of whatever kind: a width that the architecture does not take, or (by 1) its own fault
            if factor == 1:
                raise
        else:
            break
    return small


def _factors(config: Any) -> list[int]:
    """How many times narrower to try, the most first and 1 last: what leaves a head of the text model whole, and
    something of it to rotate."""
    values = vars(config.get_text_config())
    head = _first(values, OF_HEAD) or _first(values, OF_MODEL) // (_first(values, HEADS) or HEADLESS)
    rope = values.get("rope_parameters") or {}
    shares = [each.get("partial_rotary_factor", 1) for each in (rope, *rope.values()) if isinstance(each, dict)]
    rotated = [values[name] for name in OF_HEAD if isinstance(values.get(name), int)]
    most = int(min(*rotated, head * min(shares, default=1), head)) // NARROWEST
    return [factor for factor in range(most, 1, -1) if head % factor == 0] + [1]


def _make_small(part: Any, factor: int) -> None:
    values = vars(part)
    heads, depth = _first(values, HEADS) or 1, _first(values, DEPTHS) or len(values.get("layers_block_type") or ())
    kept = _kept(values, depth)
    own: dict[int, dict[str, int]] = {}  # of layers that differ in more than their kind (Gemma 4)
    if getattr(part, "is_heterogeneous", False):
        for place, layer in enumerate(kept):
            differs = part.per_layer_config[layer]
            own[place] = {name: max(1, getattr(differs, name) // factor) for name in part.per_layer_attributes}
        part.per_layer_config = None
    for name, value in [*values.items()]:
        if name in LISTED and isinstance(value, list):
            setattr(part, name, [place for place, layer in enumerate(kept) if layer in value])
        elif is_per_layer(value, depth):
            setattr(part, name, [value[layer] for layer in kept])
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            continue
        elif name in DEPTHS:
            setattr(part, name, len(kept))
        elif name in FIRST:
            setattr(part, name, sum(layer < value for layer in kept))
        elif name == LAST:
            setattr(part, name, sum(layer >= depth - value for layer in kept))
        elif name in MOST:
            setattr(part, name, min(value, MOST[name]))
        elif name in OF_MODEL:
            setattr(part, name, heads * max(1, -(-value // (factor * heads))))
        elif "intermediate" in name:
            setattr(part, name, ALIGNED * -(-value // (ALIGNED * factor)))
        elif name in OF_HEAD:
            setattr(part, name, max(NARROWEST, value // factor))
        elif WIDTH.fullmatch(name):
            setattr(part, name, max(1, value // factor))
    if own:
        part.per_layer_config = own
    rope = values.get("rope_parameters") or {}
    if sections := rope.get("mrope_section"):  # pairs of a head that turn by time, height and width
        pairs = (_first(values, OF_HEAD) or _first(values, OF_MODEL) // heads) // 2
        fewer = [pairs * section // sum(sections) for section in sections[1:]]
        part.rope_parameters = {**rope, "mrope_section": [pairs - sum(fewer), *fewer]}


def _kept(values: Mapping[str, Any], depth: int) -> list[int]:
    """The first layer of each kind, two at least; where a key gives kinds by a period, also all between them."""
    every = range(depth)
    periods = {name: values[name] for name in PERIODS if (values.get(name) or 1) > 1}
    facts: list[Any] = [value for name, value in values.items() if name not in LISTED and is_per_layer(value, depth)]
    facts += [[layer < values[name] for layer in every] for name in FIRST if values.get(name)]
    facts += [[layer < depth - (values.get(LAST) or 0) for layer in every]]
    facts += [[layer in values[name] for layer in every] for name in LISTED if values.get(name)]
    for name, period in periods.items():
        offset = values[name.replace("period", "offset")] if "period" in name else period - 1
        facts.append([layer % period == offset for layer in every])
    if pattern := values.get("block_types"):  # RecurrentGemma repeats it
        facts.append([pattern[layer % len(pattern)] for layer in every])
    firsts = {str(kind): layer for layer, kind in reversed([*enumerate(zip(*facts, strict=True))])}
    kept = sorted(firsts.values() if len(firsts) > 1 else every[:2])[:LAYERS]
    return [*every[: kept[-1] + 1][:LAYERS]] if kept and (periods or pattern) else kept


def is_per_layer(value: Any, depth: int) -> bool:
    """True for a list in a configuration with a value for each of so many layers."""
    return isinstance(value, list) and len(value) == depth > 2


def _first(values: Mapping[str, Any], names: Sequence[str]) -> int:
    return next((values[name] for name in names if isinstance(values.get(name), int)), 0)


def _parts(config: Any) -> Iterator[Any]:
    """The configuration and those of its parts."""
    yield config
    for name in getattr(config, "sub_configs", {}):
        if (part := getattr(config, name, None)) is not None:
            yield from _parts(part)
