"""Write a trained model as transformers and vLLM load it."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, GenerationConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import GENERATION_CONFIG_NAME

from grpo_core import run_files
from grpo_core.config.inputs import ModelConfig
from grpo_core.distributed import gathered, wait_for_all
from grpo_core.model.checkpoint_fit import file_of, saved_tensors
from grpo_core.model.four_bit import take_dequantised
from grpo_core.model.images import images_of
from grpo_core.model.loading import (
    load_model,
    load_trainable_state,
    trainable_state,
    whole_weights,
    with_adapter,
)
from grpo_core.model.pretrained import ask_again, from_pretrained
from grpo_core.model.sharded import is_sharded

PROCESSORS = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
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
        base = load_model(config.name_or_path, config.revision, shard=shard, images=images_of(model))
        merged = with_adapter(base, new)
        take_dequantised(merged, model)
        load_trainable_state(merged, trainable_state(model))
        model = merged if shard is not None else merged.merge_and_unload()
    if is_sharded(model):
        _save_sharded(model, folder)
    elif is_main:
        _save_whole(model, folder)
    if is_main:
        _carry_over(config, model, folder)
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


def _carry_over(config: ModelConfig, model: Any, folder: Path) -> None:
    """Put beside a saved model what else its base takes images and the like with: the settings of its processors, and
    if the model is only the text part of the base, the other tensors, bit for bit, under the base's configuration."""
    path, revision = config.name_or_path, config.revision
    for name in PROCESSORS:
        if file := file_of(path, revision, name):
            shutil.copyfile(file, folder / name)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    whole = from_pretrained(AutoConfig, path, revision)
    if whole.model_type == base.config.model_type:
        return
    own, theirs = saved_tensors(folder), saved_tensors(path, revision)
    tied = revert_weight_conversion(base, dict.fromkeys(base.all_tied_weights_keys, torch.empty(0)))
    if strange := own.keys() - theirs.keys() - tied.keys():
        print(f"only the text model is saved, since {path} has no tensor named {min(strange)}", flush=True)
        return
    files = {name: file.name.replace("model.s", "model-text.s") for name, file in own.items()}
    if (text := folder / "model.safetensors").exists():  # loaders would look no further
        text.rename(folder / "model-text.safetensors")
    others = {name: file for name, file in theirs.items() if name not in own and name not in tied}
    for number, file in enumerate(sorted({*others.values()}), 1):
        with safe_open(file, "pt") as held:
            kept = {name: held.get_tensor(name) for name, at in others.items() if at == file}
        save_file(kept, folder / f"model-others-{number}.safetensors", metadata={"format": "pt"})
        files |= dict.fromkeys(kept, f"model-others-{number}.safetensors")
    _write_index(files, folder)
    for part in (whole, whole.get_text_config()):
        part.dtype = base.dtype
    whole.save_pretrained(folder)


def _write_index(files: Mapping[str, str], folder: Path) -> None:
    """Write which file has which tensor."""
    size = sum((folder / file).stat().st_size for file in {*files.values()})
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


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
    written: list[tuple[str, str]] = []  # name and file of each weight
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
            written += [(name, file) for name in own]
    written = gathered(written)
    if process.is_main_process:
        _write_index(dict(written), folder)
        base.config.save_pretrained(folder)
        ask_again(base, folder)
        _save_generation_config(base.generation_config, folder)
