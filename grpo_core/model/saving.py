"""Write a trained model as transformers and vLLM load it."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import GENERATION_CONFIG_NAME

from grpo_core import run_files
from grpo_core.config.inputs import ModelConfig
from grpo_core.distributed import gathered, wait_for_all
from grpo_core.model.four_bit import take_dequantised
from grpo_core.model.loading import (
    load_model,
    load_trainable_state,
    trainable_state,
    whole_weights,
    with_adapter,
)
from grpo_core.model.pretrained import ask_again
from grpo_core.model.sharded import is_sharded

FILE_BYTES = 4 * 2**30  # of weights, in one file


def save_model(
    model: Any, tokenizer: Any, folder: Path, config: ModelConfig, shard: Callable[[Any], None] | None = None
) -> None:
    """Write the model and its tokenizer. Called by every process.

    An adapter is written to a folder `adapter` beside it, and merged into the float32 base, which is loaded for that:
    the training may hold a bfloat16 one. Weights that it holds in 4 bits are those that the codes stand for: over them
    the adapter was trained. `shard`: how the model is sharded, for that base. A sharded model is never
    whole in one process: each writes files of its own, of weights that are gathered one by one.
    """
    is_main = PartialState().is_main_process
    if is_main:
        shutil.rmtree(folder, ignore_errors=True)  # left when saving was killed: its files may have other names
    wait_for_all()
    if config.use_peft and is_main:
        save_adapter(model, folder.with_name(run_files.ADAPTER))
    if config.use_peft and (is_main or shard is not None):
        new = config.model_copy(update={"adapter": None})  # the first adapter's folder may be gone by now
        merged = with_adapter(load_model(config.name_or_path, config.revision, shard=shard), new)
        take_dequantised(merged, model)
        load_trainable_state(merged, trainable_state(model))
        model = merged if shard is not None else merged.merge_and_unload()
    if is_sharded(model):
        _save_sharded(model, folder)
    elif is_main:
        _save_whole(model, folder)
    if is_main:
        tokenizer.save_pretrained(folder)
    wait_for_all()


def _save_whole(model: Any, folder: Path) -> None:
    generation, model.generation_config = model.generation_config, GenerationConfig()
    try:
        model.save_pretrained(folder)
    finally:
        model.generation_config = generation
    ask_again(model, folder)
    _save_generation_config(generation, folder)


def _save_generation_config(generation: GenerationConfig | None, folder: Path) -> None:
    """Write it as the base has it: transformers would refuse one that it has read, such as a temperature without
    sampling."""
    file = folder / GENERATION_CONFIG_NAME
    file.unlink(missing_ok=True)
    if generation is not None:
        generation.to_json_file(file, keys_to_pop=["compile_config"])


def save_adapter(model: Any, folder: Path | str) -> None:
    """Write the adapter of a model as peft and vLLM load it."""
    # Left to itself, peft asks the hub whether the embedding was resized, and gathers a sharded base. It wants tied
    # modules by each of their names.
    state = {name: each.detach() for name, each in model.named_parameters(remove_duplicate=False) if each.requires_grad}
    model.save_pretrained(folder, state_dict=state, save_embedding_layers=False)


def _save_sharded(model: Any, folder: Path) -> None:
    """Write files of consecutive weights, of at most FILE_BYTES or one weight; the processes take turns."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    left_out = set(base.all_tied_weights_keys)  # transformers ties them when it loads
    files: dict[str, int] = {}  # weight → number of its file
    number = filled = 0
    for name, tensor in base.state_dict().items():
        size = tensor.numel() * torch.float32.itemsize
        if filled and filled + size > FILE_BYTES:
            number, filled = number + 1, 0
        files[name.replace(".base_layer", "")] = number
        filled += size
    folder.mkdir(parents=True, exist_ok=True)
    process, count = PartialState(), number + 1
    written: list[tuple[str, str, int]] = []  # name, file and bytes of each weight
    weights = ((name, tensor) for name, tensor in whole_weights(model, torch.float32) if name not in left_out)
    for number, group in itertools.groupby(weights, key=lambda item: files[item[0]]):
        mine = number % process.num_processes == process.process_index
        kept: dict[str, Tensor] = {}
        for name, tensor in group:
            if mine:
                kept[name] = tensor.cpu()
        if mine:
            own = {name: value.contiguous() for name, value in revert_weight_conversion(base, kept).items()}
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            save_file(own, folder / file, metadata={"format": "pt"})
            written += [(name, file, value.numel() * value.itemsize) for name, value in own.items()]
    written = gathered(written)
    if process.is_main_process:
        index = {
            "metadata": {"total_size": sum(size for _, _, size in written)},
            "weight_map": {name: file for name, file, _ in sorted(written)},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        base.config.save_pretrained(folder)
        ask_again(base, folder)
        _save_generation_config(base.generation_config, folder)
