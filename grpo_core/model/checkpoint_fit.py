"""Whether what a checkpoint holds is what a model that is loaded from it has."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.core_model_loading import PrefixChange, revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import cached_file

from grpo_core.distributed import own_shard

NAMED = 3  # weights that an error names
# Buffers that older releases of transformers saved, of attention's masks and positions: they follow from config.json.
BUFFERS = ("masked_bias", "causal_mask", "position_ids", "embed_positions", "inv_freq", "cos_cached", "sin_cached")
# What is saved beside, or in place of, a quantised layer's weight.
QUANTISED = re.compile(
    r"\.(qweight|\w*_packed|(weight|input|output)\w*_scale\w*|scales|\w*zeros|\w*zero_point|g_idx|absmax|quant_\w+|SCB)$"
)
RANDOM = "random ones would take their place"


def misfit(model: nn.Module, found: Mapping[str, Any]) -> str:
    """Problem of saved weights that are not those of the model: it would have random ones, or compute otherwise than
    what was saved; "" if they are. `found`: transformers' `output_loading_info`, without tied weights and others that
    it knows to be harmless.

    Saved weights without a place are a problem inside a layer, or a module with weights. Elsewhere they are other parts
    of the checkpoint: towers for images, layers that predict further tokens.
    """
    modules, buffers = dict(model.named_modules()), dict(model.named_buffers())
    layers = [name for name, module in modules.items() if isinstance(module, GradientCheckpointingLayer)]

    def is_of_a_part(key: str) -> bool:
        place, _, name = key.rpartition(".")
        home = modules.get(place)
        has_weights = home is not None and bool(home._parameters)
        is_mask = name == "bias" and home is not None and bool(home._modules) and not has_weights  # an attention's
        if is_mask or key in buffers or name in BUFFERS:
            return False
        return has_weights or key.startswith(tuple(f"{layer}." for layer in layers))

    missing, unknown, beyond = {*found["missing_keys"]}, {*found["unexpected_keys"]}, set[str]()
    if not missing:
        own, prefix = modules[""]._modules, getattr(model, "base_model_prefix", "")
        saved = [key if key.partition(".")[0] in own else f"{prefix}.{key}" for key in unknown]  # of the base alone
        unknown, beyond = {*filter(is_of_a_part, saved)}, _of_further_layers(modules, layers, saved)
    quantised = {key for key in unknown if QUANTISED.search(key)}
    problems = (
        ("weights are missing", missing, RANDOM),
        ("weights have another shape than config.json says", {key for key, *_ in found["mismatched_keys"]}, RANDOM),
        (
            "saved weights have no place in the model",
            unknown - quantised,
            "what was saved computes with more than the model has",
        ),
        (
            "saved tensors are of quantised layers",
            quantised,
            "load them as quantised, save the model dequantised, and name that",
        ),
        ("saved weights are of layers beyond the last", beyond, "config.json has fewer layers than were saved"),
    )
    said = [
        f"{len(keys)} {what}, such as {', '.join(sorted(keys)[:NAMED])}: {so}" for what, keys, so in problems if keys
    ]
    return f"its weights are not those of {type(model).__name__}: {'; '.join(said)}" if said else ""


def _of_further_layers(modules: Mapping[str, nn.Module], layers: Iterable[str], saved: Iterable[str]) -> set[str]:
    """Those of the saved weights that belong to layers after the model's last, made of the same parts. Layers that
    predict further tokens have others."""
    parts, further = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for layer in layers:
        parts[layer.rpartition(".")[0]] |= modules[layer]._modules.keys()
    for key in saved:
        for stack in parts:
            number = key.removeprefix(f"{stack}.").partition(".")[0]
            if key.startswith(f"{stack}.{number}.") and number.isdigit() and f"{stack}.{number}" not in modules:
                further[f"{stack}.{number}."].add(key)
    return {
        key
        for layer, keys in further.items()
        if {key.removeprefix(layer).partition(".")[0] for key in keys} <= parts[layer.rsplit(".", 2)[0]]
        for key in keys
    }


@torch.no_grad()
def not_finite(model: nn.Module) -> str:
    """Problem of weights that are NaN or infinite; "" if all are finite. Those of a shard are this process's."""
    bounds = {
        name: torch.stack(torch.aminmax(weights))
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and (weights := own_shard(parameter)).numel()
    }
    if not bounds or (finite := torch.stack([*bounds.values()]).isfinite().all(-1)).all():
        return ""
    bad = [name for name, is_finite in zip(bounds, finite.tolist(), strict=True) if not is_finite]
    return f"{len(bad)} of its weights hold NaN or infinity, such as {', '.join(bad[:NAMED])}"


def file_of(path: Path | str, revision: str | None, name: str) -> Path | None:
    """The file of this name in a folder or repository; None if there is none, or the hub does not answer."""
    optional = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = cached_file(path, name, revision=revision, **optional)
    return Path(str(found)) if found else None


def saved_tensors(path: Path | str, revision: str | None = None) -> dict[str, Path]:
    """Names of the tensors in a folder's safetensors, or a loaded repository's, each with its file."""
    config = file_of(path, revision, "config.json")
    files = config.parent.glob("model*.safetensors") if config else ()
    return {name: file for file in files for name in safe_open(file, "pt").keys()}  # noqa: SIM118  # it is no mapping


def name_as_saved(model: Any, path: Path | str, revision: str | None) -> None:
    """Make the text model of a multimodal checkpoint save its weights under the names that they have there."""
    theirs, prefix = saved_tensors(path, revision), model.base_model_prefix
    first = next(iter(revert_weight_conversion(model, {next(iter(model.state_dict())): torch.empty(0)})))
    if first not in theirs and f"{prefix}.{first}" in theirs:
        model._weight_conversions = [*(model._weight_conversions or []), PrefixChange(prefix_to_remove=prefix)]
