"""Trainings with options as drawn end with the weights of plain float64 loops over the same samples."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch.nn.attention import flex_attention

from grpo_core.config import memory_bounds
from grpo_core.config.inputs import ModelConfig
from grpo_core.model import logprobs as head
from grpo_core.model import packed_attention as packing
from grpo_core.model.loading import load_model, trainable_state, with_adapter
from grpo_core.model.saving import save_adapter
from grpo_core.training import loop
from tests.conftest import config_values, make_model, make_run, with_keys
from tests.grpo_core.algorithm.plain_losses import PLAIN_LOSSES, plain
from tests.grpo_core.training.plain_training import assert_plain
from tests.grpo_core.training.several import in_processes
from tests.plain_kernels import plain_varlen
from tests.sources import sources_run, two_sources

LORA = {"use_peft": True, "lora_r": 3, "lora_alpha": 12, "lora_target_modules": ["q_proj", "down_proj"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("Qwen2", {}),
    "tied": ("Qwen2", {"tie_word_embeddings": True}),
    "experts": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}),
}
OPTIONS: dict[str, list[Any]] = {
    "num_iterations": [1, 2],
    "gradient_accumulation_steps": [1, 2, 3],
    "beta": [0.0, 0.1],
    "epsilon_high": [None, 0.28],
    "importance_sampling_level": ["token", "sequence"],
    "off_policy_mask_threshold": [None, 0.02],
    "vllm_importance_sampling_correction": [True, True, False],
    "vllm_importance_sampling_clip_max": [1.3, 3.0],
    "vllm_importance_sampling_mode": ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    "scale_rewards": ["group", "batch", "none"],
    "entropy_coef": [0.0, 0.1],
    "top_entropy_quantile": [1.0, 0.5],
    "mask_truncated_completions": [False, True],
    "dynamic_sample": [False, False, True],
    "repetition_penalty": [1.0, 1.3],
    "temperature": [1.0, 0.8],
    "max_grad_norm": [1e9, 0.05],
    "gradient_checkpointing": [False, False, True],
    "max_steps": [3, 5],
}
WAYS: dict[str, list[Any]] = {
    "attention": ["rows", "padded", "varlen", "flex"],
    "tokens": [1, 30, 90, 1000],  # per pass
    "chunk": [60, 200, 2**20],
    "kept": [0, 2**25],
    "short": [0, 1000],
}
CALM = {"adam_epsilon": 1e-3, "weight_decay": 0.1, "warmup_steps": 2, "adam_beta2": 0.9}


def silent(prompts: list[str], completion_ids: list[list[int]]) -> list[float]:
    """Tells completions apart where the first digit is odd, and nowhere else."""
    pairs = zip(prompts, completion_ids, strict=True)
    return [float(sum(ids) % 7) if int(prompt[0]) % 2 else 0.0 for prompt, ids in pairs]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Also an adapter that does something, of the plain one."""
    folder = tmp_path_factory.mktemp("models")
    shapes = {name: {**shape, "initializer_range": 0.03} for name, (_, shape) in MODELS.items()}
    found = {name: make_model(folder / name, kind, **shapes[name]) for name, (kind, _) in MODELS.items()}
    adapted = with_adapter(load_model(found["plain"]), ModelConfig(name_or_path=str(found["plain"]), **LORA))
    torch.manual_seed(5)
    for tensor in trainable_state(adapted).values():
        torch.nn.init.normal_(tensor, std=0.1)
    save_adapter(adapted, folder / "adapter")
    return found | {"adapter": folder / "adapter"}


@contextlib.contextmanager
def passes(draw: random.Random) -> Iterator[dict[str, Any]]:
    """How the training's passes go through the model, as drawn."""
    way = {name: draw.choice(values) for name, values in WAYS.items()}
    if way["attention"] == "flex":
        way["tokens"] = 1000  # each pass is slow without its compiler
    load_session = loop.load_session

    def loaded(run: Path) -> Any:
        session = load_session(run)
        if session.policy.packs:
            session.policy.packs = way["attention"] != "rows"
            session.policy.attention = way["attention"] if way["attention"] in ("varlen", "flex") else "padded"
        session.memory.planned = session.memory.tokens = way["tokens"]
        return session

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "load_session", loaded)
        # On a CPU flex attention is plain torch, with gradients too, except that a check refuses them.
        patch.setattr(flex_attention, "_validate_device", lambda *_: None)
        patch.setattr(packing, "varlen_attn", plain_varlen)  # flash attention's kernel is for GPUs only
        patch.setattr(packing, "SHORT", {torch.float32: way["short"]})
        patch.setattr(memory_bounds, "CHUNK_LOGITS", way["chunk"])
        patch.setattr(head, "KEPT_LOGITS", way["kept"])
        yield way


def drawn_run(folder: Path, models: dict[str, Path], draw: random.Random, loss_type: str, **keys: Any) -> Path:
    """A run with options as drawn; `keys` are not."""
    needs = {key: [value] for key, value in plain(loss_type).needs.items()}
    choices = OPTIONS | needs | {key: [*values] for key, values in plain(loss_type).drawn.items()}
    options = {key: draw.choice(values) for key, values in choices.items()} | keys
    w, steps = options.get("num_processes", 1), draw.choice([1, 2, 3, 4])
    b = draw.choice([n for n in range(1, 9) if n * w * steps % 4 == 0 and n * w * steps <= 32])
    model = draw.choice([*MODELS, "adapter"])
    base = models["plain" if model == "adapter" else model]
    if model == "adapter":  # which a sharded training cannot start from
        given = {} if options.get("sharding", "none") != "none" else {"adapter": str(models["adapter"])}
        options |= LORA | given
    if options["repetition_penalty"] != 1:
        options["vllm_importance_sampling_correction"] = True  # else refused
    cut = {"loss_type": loss_type, "per_device_train_batch_size": b, "steps_per_generation": steps}
    (folder / "data").mkdir(parents=True)
    if from_sources := draw.random() < 0.3:
        values = two_sources(base, folder / "data")
    else:
        values = config_values(base, folder)
        values["rewards"].append({"function": f"{__name__}:silent"})
    values = with_keys(values, **cut, **options, **CALM)
    return (sources_run if from_sources else make_run)(folder / "run", values)


# Each loss once; many more in `make e2e`.
NUMBERS = [*range(8), *(pytest.param(number, marks=pytest.mark.e2e) for number in range(8, 120))]


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_a_training_is_that_of_plain_loops(number: int, models: dict[str, Path], tmp_path: Path) -> None:
    draw = random.Random(number)
    run = drawn_run(tmp_path, models, draw, [*PLAIN_LOSSES][number % len(PLAIN_LOSSES)])
    with passes(draw):
        loop.train(run, run / "training")
    AcceleratorState._reset_state(reset_partial_state=True)
    assert_plain(run)


@pytest.mark.served
@pytest.mark.parametrize("number", NUMBERS)
def test_processes_with_whole_models_or_shares_train_as_plain_loops(
    number: int, models: dict[str, Path], tmp_path: Path
) -> None:
    draw, several = random.Random(1000 + number), number >= len(PLAIN_LOSSES)
    keys = {"num_processes": draw.choice([2, 3, 4, 8]) if several else 2, "sharding": ["none", "full"][number // 2 % 2]}
    if keys["num_processes"] == 4 and keys["sharding"] == "full":
        keys["sharding"] = draw.choice(["full", "hybrid"])
    run = drawn_run(tmp_path, models, draw, [*PLAIN_LOSSES][number % len(PLAIN_LOSSES)], **keys)

    def start(rank: int) -> None:
        os.environ["LOCAL_WORLD_SIZE"] = "2" if keys["sharding"] == "hybrid" else str(keys["num_processes"])
        loop.train(run, run / "training")

    with passes(draw):
        in_processes(keys["num_processes"], tmp_path / "group", start)
    assert_plain(run)
