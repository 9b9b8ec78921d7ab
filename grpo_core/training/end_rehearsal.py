"""What the end of a training needs, tried before its first update: saving, and room on the disk."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from grpo_core import run_files
from grpo_core.config.inputs import ModelConfig
from grpo_core.config.run import RunConfig
from grpo_core.data.prompts import load_tokenizer
from grpo_core.distributed import from_main, wait_for_all
from grpo_core.errors import TrainingError
from grpo_core.model.loading import load_model, trainable_state, whole_weights, with_adapter
from grpo_core.model.saving import save_model
from grpo_core.model.sharded import sharding
from grpo_core.model.small_copy import write_small_copy
from grpo_core.planning.memory import MOMENTS
from grpo_core.planning.plan import Plan
from grpo_core.system.memory import GIB, gib_text
from grpo_core.training.state import random_state, set_random_state

FOLDER = "rehearsal"
LARGEST = 32 * 2**20  # bytes of the copy's weights: they are on the disk twice, and three times in memory
TOLERANCE = 1e-4  # relative, between weights that were merged one way and another
CHANGE = 0.02  # what is added to each weight, as a training would change it


def rehearse_end(config: RunConfig, model: Any, tokenizer: Any, plan: Plan, output: Path) -> None:
    """Try what the end of the training does. Called by every process; says what it has done.

    A small copy of the base model is changed, saved as the training's model will be, and loaded again.
    Raises TrainingError if that fails, or gives other weights or another tokenizer; or if the disk of `output` is too
    small for what the training will write.
    """
    begun, before = time.perf_counter(), random_state()
    folder, is_main = output / FOLDER, PartialState().is_main_process
    try:
        tried = _rehearse_saving(config, tokenizer, folder)
    finally:
        set_random_state(before)
        wait_for_all()
        if is_main:
            shutil.rmtree(folder, ignore_errors=True)
    needed = disk_needed(config, model, plan)
    if is_main:
        print(f"training: {tried} ({time.perf_counter() - begun:.1f} s)", flush=True)
    _check_disk(output, needed)


def _rehearse_saving(config: RunConfig, tokenizer: Any, folder: Path) -> str:
    """Try on a small copy that what is saved is what was trained. Returns what was tried, as a sentence."""
    base, saved = folder / "base", folder / run_files.MODEL
    keys, is_main = config.model, PartialState().is_main_process
    small = keys.model_copy(update={"name_or_path": str(base), "revision": None, "adapter": None})
    problem = ""
    if is_main:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        torch.manual_seed(0)
        try:
            write_small_copy(keys.name_or_path, keys.revision, base, LARGEST)
            _changed(small, config, shard=False)
        except Exception as error:  # it says something about the copy only
            problem = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    if problem := from_main(problem):
        return f"saving was not tried, since {keys.name_or_path} has no small copy to try it on ({problem})"
    model = _changed(small, config, shard=True)
    try:
        save_model(model, tokenizer, saved, small, sharding(config.train, frozen=True))
    except Exception as error:
        raise TrainingError(
            f"the trained model could not be saved at the end: with a small copy of {keys.name_or_path}, {error}"
        ) from error
    trained = {name: weights.cpu() for name, weights in whole_weights(model, torch.float32)}
    if problem := from_main(_difference(trained, tokenizer, saved) if is_main else ""):
        raise TrainingError(
            f"what would be saved at the end is not what was trained: with a small copy of {keys.name_or_path}, "
            f"{problem}"
        )
    return "saving was tried with a small copy of the model"


def _changed(small: ModelConfig, config: RunConfig, *, shard: bool) -> Any:
    """The small copy as the training holds its model, in float32, after a change of what it trains."""
    sharder = sharding(config.train, frozen=small.use_peft) if shard else None
    base = load_model(small.name_or_path, shard=sharder, in_4bit=small.load_in_4bit, device=PartialState().device)
    model = with_adapter(base, small)
    with torch.no_grad():
        for weights in trainable_state(model).values():
            weights += CHANGE
    return model


def _difference(trained: dict[str, torch.Tensor], tokenizer: Any, saved: Path) -> str:
    """What is other in what was saved; "" if nothing is."""
    try:
        loaded = dict(whole_weights(load_model(saved)))
        read = load_tokenizer(ModelConfig(name_or_path=str(saved)))
    except Exception as error:
        return f"it cannot be loaded again: {error}"
    if missing := trained.keys() ^ loaded.keys():
        return f"{len(missing)} weights are in one of the two only, such as {min(missing)}"
    off = {name: (loaded[name].float() - weights.float()).norm() for name, weights in trained.items()}
    if wrong := [name for name, norm in off.items() if not norm <= TOLERANCE * trained[name].float().norm()]:
        return f"{len(wrong)} weights are other ones, such as {wrong[0]}"
    if read.get_vocab() != tokenizer.get_vocab() or read.chat_template != tokenizer.chat_template:
        return "its tokenizer has other tokens or another chat template"
    return ""


def disk_needed(config: RunConfig, model: Any, plan: Plan) -> int:
    """Bytes that a training's checkpoints, its best policy and its model take together at most, estimated from the
    numbers of weights. Completions and logs are not in it."""
    keys, size = config.train, torch.float32.itemsize
    trained = size * sum(weights.numel() for weights in trainable_state(model).values())
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    whole = size * base.num_parameters()
    moved = config.algorithm.sync_ref_model + (config.teacher.update_rate is not None)  # reference, average
    checkpoint = (1 + moved + MOMENTS[keys.optim]) * trained
    # Those that are kept, a healthy one before them, and the one that is being written.
    checkpoints = min(keys.save_total_limit + 2, max(1, (plan.max_steps - 1) // keys.save_steps))
    best = 2 * trained if keys.eval_steps else 0  # the last one, and the one that takes its place
    return int(checkpoints * checkpoint + best + whole + trained * config.model.use_peft)


def _check_disk(output: Path, needed: int) -> None:
    """Raises TrainingError, in every process, if the disk has less room than is needed beside what is there already."""
    problem = ""
    if PartialState().is_main_process:
        there = sum(file.stat().st_size for file in output.rglob("*") if file.is_file())
        free = shutil.disk_usage(output).free
        if free < needed - there:
            problem = (
                f"{output}: the disk has {gib_text(free / GIB)} left, and this training writes up to "
                f"{gib_text(needed / GIB)} there (checkpoints, the best policy, the model), of which "
                f"{gib_text(there / GIB)} are there. Make room, lower train.save_total_limit, or raise train.save_steps"
            )
    if problem := from_main(problem):
        raise TrainingError(problem)
