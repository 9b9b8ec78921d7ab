"""What a training and an evaluation load alike: the processes, the prompts, the engine, and the check of the model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from grpo_core import run_files
from grpo_core.config.run import RunConfig
from grpo_core.data.images import encode_row, load_images, show_images
from grpo_core.data.processor import load_processor
from grpo_core.data.prompts import Prompts, load_prompts, load_tokenizer
from grpo_core.distributed import start_processes
from grpo_core.environments.setting import Setting, make_setting
from grpo_core.model.capabilities import check_padding
from grpo_core.model.images import Images
from grpo_core.model.loading import load_model
from grpo_core.model.policy import Policy
from grpo_core.model.precision import in_float32, with_precision_of
from grpo_core.model.pretrained import check_context
from grpo_core.model.sharded import is_sharded
from grpo_core.rollout.types import Engine
from grpo_core.rollout.waiting import longest_wait, phase_limits
from grpo_core.system.progress import expect


@dataclass(frozen=True)
class PromptSets:
    """Prompts by set, and what made token ids of them."""

    tokenizer: Any
    setting: Setting | None  # with tools or environments
    sets: dict[str, Prompts]
    images: Images | None  # those of the prompts, if they have any


def start_configured(config: RunConfig, *, deterministic: bool) -> tuple[RunConfig, Accelerator]:
    """Start this process as one of its group. Returns the configuration with the precision of its device."""
    expect(config.train.hang_timeout, phase_limits(config))
    accelerator = start_processes(longest_wait(config), deterministic=deterministic)
    return with_precision_of(config, accelerator.device), accelerator


def read_prompts(config: RunConfig, files: Mapping[str, Path]) -> PromptSets:
    """Read the validated prompts in `files`, by set, with the images beside them."""
    tokenizer = load_tokenizer(config.model)
    setting = make_setting(config, tokenizer)
    encode, options, images = setting.encode if setting else None, config.data.chat_template_kwargs, None
    if (path := next(iter(files.values())).with_name(run_files.IMAGES)).exists():
        processor = load_processor(config.model)
        images = load_images(path, processor, config.model.freeze_vision_tower)
        encode = partial(encode_row, show_images(path, processor, images), options)
    sets = {name: load_prompts(path, tokenizer, options, encode) for name, path in files.items()}
    return PromptSets(tokenizer, setting, sets, images)


def check_lengths(model: Any, max_length: int) -> None:
    """Raises ConfigError if the model does not take sequences of `max_length` tokens, or computes them in another way
    beside others."""
    check_context(model.config, max_length)
    with nullcontext() if is_sharded(model) else in_float32(model):
        check_padding(model, max_length)


def fallbacks(engine: Engine | None, policy: Policy | None = None) -> list[str]:
    """Sentences to print once, on what is done in a slower or other way than with other models or machines, and why: in
    the policy's passes, then in sampling."""
    return [*(policy.notes if policy else []), *(engine.notes if engine else [])]


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
