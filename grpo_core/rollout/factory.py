"""Build the engine that a configuration names."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from grpo_core.config.run import RunConfig
from grpo_core.model.loading import load_model
from grpo_core.model.sharded import is_sharded
from grpo_core.rollout.types import Engine


def make_engine(
    config: RunConfig, model_path: Path | str, model: nn.Module, tokenizer: object, max_length: int
) -> Engine:
    """Make the configured engine with the weights at `model_path`, the folder or hub name that `model` came from.

    `max_length`: the longest prompt plus completion, in tokens.
    """
    name = config.rollout.engine_on(has_gpu=next(model.parameters()).device.type == "cuda")
    if name == "transformers":
        from grpo_core.rollout.transformers_engine import TransformersEngine

        # Sharded, it would gather all layers for each token, and the processes sample unequally many.
        if is_sharded(model):
            dtype = torch.bfloat16 if config.train.mixed_precision == "bf16" else torch.float32
            device = next(model.parameters()).device
            model = load_model(model_path, config.model.revision, dtype=dtype, device=device)
        return TransformersEngine(model, tokenizer, max_length)
    if name == "vllm-server":
        from grpo_core.rollout.vllm.server_engine import VLLMServerEngine

        return VLLMServerEngine(config, model, max_length)
    from grpo_core.rollout.vllm.colocated_engine import VLLMEngine

    return VLLMEngine(config, model_path, model, max_length)
