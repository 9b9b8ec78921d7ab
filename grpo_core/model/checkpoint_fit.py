"""Whether what a checkpoint holds is what a model that is loaded from it has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_core.distributed import own_shard
from grpo_core.model.pretrained import from_pretrained

NAMED = 3  # weights that an error names


def misfit(model: nn.Module, found: Mapping[str, Any]) -> str:
    """Problem of saved weights that are not those of the model, whose own would be random in their place; "" if they
    are. `found`: transformers' `output_loading_info`, without tied weights and others that it knows to be harmless.

    Saved weights without a place are a problem inside a layer, or a module with weights. Elsewhere they are other parts
    of the checkpoint: towers for images, layers that predict further tokens.
    """
    modules, buffers = dict(model.named_modules()), dict(model.named_buffers())  # which older checkpoints have too
    layers = tuple(f"{name}." for name, module in modules.items() if isinstance(module, GradientCheckpointingLayer))

    def is_of_a_part(key: str) -> bool:
        home = modules.get(key.rpartition(".")[0])
        return key.startswith(layers) or (home is not None and bool(home._parameters))

    unknown = {key for key in found["unexpected_keys"] if key not in buffers and is_of_a_part(key)}
    problems = {
        "are missing": {*found["missing_keys"]},
        "have another shape than config.json says": {key for key, *_ in found["mismatched_keys"]},
        "have no place in the model": {*found["unexpected_keys"]} if found["missing_keys"] else unknown,
    }
    said = [
        f"{len(keys)} weights {what}, such as {', '.join(sorted(keys)[:NAMED])}"
        for what, keys in problems.items()
        if keys
    ]
    if not said:
        return ""
    return f"its weights are not those of {type(model).__name__}, and random ones would take their place: " + "; ".join(
        said
    )


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


def left_out(path: Path | str, revision: str | None, model: Any) -> list[str]:
    """A sentence if the model is only the text part of what is saved at `path`, and so will be what is saved of it."""
    saved = from_pretrained(AutoConfig, path, revision).model_type
    if saved == model.config.model_type:
        return []
    return [
        f"{path} is a multimodal model ({saved}): only its text model ({model.config.model_type}) is trained and saved"
    ]
