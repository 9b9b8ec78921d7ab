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

from benchmarks.staleness_learning import VirtualServers
from grpo_core.config import memory_bounds
from grpo_core.config.inputs import ModelConfig
from grpo_core.config.run import RunConfig
from grpo_core.model import logprobs as head
from grpo_core.model import packed_attention as packing
from grpo_core.model.loading import load_model, trainable_state, with_adapter
from grpo_core.model.saving import save_adapter
from grpo_core.rollout.loading import make_engine
from grpo_core.training import loop
from tests.conftest import config_values, make_model, make_run, with_keys, write_sums
from tests.grpo_core.algorithm.plain_losses import PLAIN_LOSSES, plain
from tests.grpo_core.training.plain_training import assert_plain
from tests.grpo_core.training.several import in_processes
from tests.grpo_core.training.training import metrics_of, result_of
from tests.plain_kernels import plain_varlen
from tests.sources import sources_run, two_sources
from tests.teacher_server import teacher_server

LORA = {"use_peft": True, "lora_r": 3, "lora_alpha": 12, "lora_target_modules": ["q_proj", "down_proj"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("Qwen2", {}),
    "tied": ("Qwen2", {"tie_word_embeddings": True}),
    "windowed": ("Gemma3Text", {"head_dim": 32, "sliding_window": 4}),
    "scaled": ("Granite", {"logits_scaling": 3.0}),
    "experts": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}),
}
OPTIONS: dict[str, list[Any]] = {
    "num_generations": [4, 4, 2],
    "max_completion_length": [6, 20],
    "num_iterations": [1, 2],
    "gradient_accumulation_steps": [1, 2, 3],
    "beta": [0.0, 0.1],
    "epsilon": [0.2, 0.01],
    "epsilon_high": [None, 0.28, 0.02],
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
    "temperature": [0.05, 0.7, 1.0, 1.6],
    "max_grad_norm": [1e9, 0.05],
    "gradient_checkpointing": [False, False, True],
    "max_steps": [4, 6],
    "warmup_steps": [0, 1],
}
TRUNCATIONS: list[dict[str, Any]] = [
    *({}, {}, {"top_p": 0.5}, {"top_k": 3}, {"top_p": 0.7, "top_k": 6}, {"top_k": 1}),
    *({"min_p": 0.3}, {"min_p": 0.05, "top_p": 0.8}),
]
DIVERGENCES: list[dict[str, Any]] = [
    *({}, {"divergence_beta": 0.0}, {"divergence_beta": 0.3}, {"divergence_beta": 1.0}),
    *({"divergence_beta": 0.0, "divergence_top_k": 3}, {"divergence_beta": 0.7, "divergence_top_k": 1}),
]
WAYS: dict[str, list[Any]] = {
    "tokens": [1, 30, 90, 1000],  # per pass
    "chunk": [60, 200, 2**20],
    "shares_cache": [True, False],
    "kept": [0, 2**25],
    "short": [0, 1000],
}
ATTENTION = ["rows", "padded", "varlen", "flex"]
FEW = len(PLAIN_LOSSES)
KINDS = [*MODELS, "adapter"]
CALM = {"adam_epsilon": 1e-3, "weight_decay": 0.1, "adam_beta2": 0.9}


def silent(prompts: list[str], completion_ids: list[list[int]]) -> list[float]:
    """Tells completions apart for every third prompt, and for no other."""
    pairs = zip(prompts, completion_ids, strict=True)
    return [float(sum(ids) % 7) if int(prompt[:2]) % 3 == 0 else 0.0 for prompt, ids in pairs]


def told(prompts: list[str], completion_ids: list[list[int]]) -> list[float]:
    """Tells completions apart for every prompt."""
    return [float(sum(ids) % 7) for ids in completion_ids]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Also an adapter that does something, of the plain one, two teachers of other sizes, and a mixture of six."""
    folder = tmp_path_factory.mktemp("models")
    shapes = {name: {**shape, "initializer_range": 0.03} for name, (_, shape) in MODELS.items()}
    found = {name: make_model(folder / name, kind, **shapes[name]) for name, (kind, _) in MODELS.items()}
    adapted = with_adapter(load_model(found["plain"]), ModelConfig(name_or_path=str(found["plain"]), **LORA))
    torch.manual_seed(5)
    for tensor in trainable_state(adapted).values():
        torch.nn.init.normal_(tensor, std=0.1)
    save_adapter(adapted, folder / "adapter")
    teacher = make_model(folder / "teacher", hidden_size=32, initializer_range=0.1)
    other = make_model(folder / "other", hidden_size=48, initializer_range=0.1)
    experts = make_model(folder / "six experts", "Qwen3Moe", **shapes["experts"] | {"num_experts": 6})
    others = {"adapter": folder / "adapter", "teacher": teacher, "other": other, "six experts": experts}
    return found | others


def virtual_servers(config: RunConfig, name: str, model: Any, tokenizer: Any, max_length: int) -> Any:
    """Make servers that sample half a token in the time of an update, if the run samples ahead."""
    if not config.rollout.max_staleness:
        return make_engine(config, name, model, tokenizer, max_length)
    return VirtualServers(model, tokenizer, max_length, update_time=0.5)


@contextlib.contextmanager
def passes(number: int, draw: random.Random) -> Iterator[None]:
    """How the training's passes go through the model."""
    way = {name: draw.choice(values) for name, values in WAYS.items()}
    attention = ATTENTION[number % len(ATTENTION)] if number < FEW else draw.choice(ATTENTION)
    if attention == "flex":
        way["tokens"] = 1000  # each pass is slow without its compiler
    load_session = loop.load_session

    def loaded(*arguments: Any) -> Any:
        session = load_session(*arguments)
        if session.policy.packs:
            session.policy.packs = attention != "rows"
            session.policy.attention = attention if attention in ("varlen", "flex") else "padded"
        if session.sampler:
            engine = session.sampler.engine
            (engine.engine if isinstance(engine, VirtualServers) else engine).shares_cache &= way["shares_cache"]
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
        yield


def drawn_run(
    folder: Path,
    models: dict[str, Path],
    number: int,
    draw: random.Random,
    teacher_url: str = "",
    by_source: bool = False,
    diverges: bool = False,
    **keys: Any,
) -> Path:
    """A run with options as drawn; `keys` are not. With `teacher_url`, it has a teacher, which this server has; with
    `by_source`, three sources, of which two have a teacher each; with `diverges`, a divergence from a teacher."""
    loss_type = [*PLAIN_LOSSES][number % len(PLAIN_LOSSES)]
    kind = KINDS[number % len(KINDS)] if number < FEW else draw.choice(KINDS)
    if diverges and kind == "scaled":  # it has logits of its own
        kind = "plain"
    needs = {key: [value] for key, value in plain(loss_type).needs.items()}
    choices = OPTIONS | needs | {key: [*values] for key, values in plain(loss_type).drawn.items()}
    options = {key: draw.choice(values) for key, values in choices.items()} | keys
    if options["temperature"] < 0.1:  # else one update makes a policy so sharp that rounding decides the next
        options["learning_rate"] = 1e-4
    teaches = draw.random() < 0.5 or bool(teacher_url) or by_source or diverges
    replaces = options["dynamic_sample"]
    if teaches:
        options["dynamic_sample"] = False  # refused where silent groups are taught
        if number % 2:  # nothing but the teacher teaches where rewards are equal
            options |= dict.fromkeys(("beta", "entropy_coef"), 0.0) | {"use_adaptive_entropy": False}
    if alone := teaches and draw.random() < 0.5 and not by_source:
        options["num_generations"] = draw.choice([1, 2])
    w, g = options.get("num_processes", 1), options["num_generations"]
    most = min(32, 24 * g)  # of 24 prompts
    sizes = {
        steps: [n for n in range(1, 9) if n * w * steps % g == 0 and n * w * steps <= most] for steps in range(1, 5)
    }
    steps = draw.choice([steps for steps, found in sizes.items() if found])
    b = draw.choice(sizes[steps])
    base = models["plain" if kind == "adapter" else kind]
    if kind == "experts" and w == 3:  # of four, the third process would have none
        base = models["six experts"]
    if kind == "adapter":
        options |= LORA | {"adapter": str(models["adapter"])}
    if kind == "experts":
        options |= {"router_aux_loss_coef": 0.3, "mask_truncated_completions": False}  # else no token may be trained
        if not keys:  # over a frozen base, routers included
            options |= LORA | {"lora_target_modules": ["q_proj"]}
    if options["repetition_penalty"] != 1:
        options["vllm_importance_sampling_correction"] = True  # else refused
    options |= TRUNCATIONS[number % len(TRUNCATIONS)] if number < FEW else draw.choice(TRUNCATIONS)
    cut = {"loss_type": loss_type, "per_device_train_batch_size": b, "steps_per_generation": steps}
    (folder / "data").mkdir(parents=True)
    if from_sources := draw.random() < 0.3 or by_source:
        values = two_sources(base, folder / "data")
    else:
        values = config_values(base, folder)
        # With KL alone, a gradient is what is left of float32 numbers that are nearly equal.
        others = [{"function": f"{__name__}:told"}] if options["beta"] else draw.choice([[], values["rewards"]])
        values["rewards"] = [*others, {"function": f"{__name__}:silent"}]
    if teaches:
        values["teacher"] = {"model": str(models["teacher"]), "weight": draw.choice([0.2, 1.0])}
        if by_source:
            add_teachers(values, models, folder / "data")
        if teacher_url:
            values["teacher"] |= {"url": teacher_url}
        elif kind != "scaled" and not (by_source and not diverges):  # else refused
            values["teacher"] |= draw.choice([each for each in DIVERGENCES if each or not diverges])
        if number % 8 in (3, 4, 6) and not by_source:
            texts = ["{better}+{prompt}", "{prompt}{better}="] if options["num_generations"] > 1 else ["0{prompt}"]
            texts += [] if from_sources else ["{answer}={prompt}"]  # lines have no answer
            values["teacher"]["template"] = texts[number % len(texts)]
            if number % 2 == 0:  # by the policy itself
                values["teacher"] = {key: it for key, it in values["teacher"].items() if key not in ("model", "url")}
            if number % 16 in (4, 6) and not values["teacher"].keys() & {"model", "url"}:  # by its average
                values["teacher"]["update_rate"] = draw.choice([0.2, 0.6])
            if "{better}" in values["teacher"]["template"]:
                options["dynamic_sample"] = replaces and not alone  # without a reward that counts, refused
    if alone:
        values["rewards"] = [{**reward, "weight": 0.0} for reward in values["rewards"]]
    values = with_keys(values, **cut, **options, **CALM)
    return (sources_run if from_sources else make_run)(folder / "run", values)


def add_teachers(values: dict[str, Any], models: dict[str, Path], folder: Path) -> None:
    """Give two sources of sums a teacher each, and the lines none."""
    write_sums(folder / "more.parquet", 34, 46)
    write_sums(folder / "more-eval.parquet", 70, 76)
    sums, lines = values["data"]["sources"]
    more = {name: str(folder / file) for name, file in (("train", "more.parquet"), ("eval", "more-eval.parquet"))}
    lines["teacher"] = ""
    values["data"]["sources"] = [lines, {**sums, **more, "name": "more", "teacher": str(models["other"])}, sums]


# Each loss, kind of model and way of attention once; many more in `make e2e`.
NUMBERS = [*range(FEW), *(pytest.param(number, marks=pytest.mark.e2e) for number in range(FEW, 10 * FEW))]


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_a_training_is_that_of_plain_loops(number: int, models: dict[str, Path], tmp_path: Path) -> None:
    draw = random.Random(number)
    run = drawn_run(tmp_path, models, number, draw)
    with passes(number, draw):
        loop.train(run, run / "training")
    AcceleratorState._reset_state(reset_partial_state=True)
    assert_plain(run)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, *(pytest.param(number, marks=pytest.mark.e2e) for number in (2, 3))])
def test_a_training_with_a_teacher_behind_a_server_is_that_of_plain_loops(
    number: int, models: dict[str, Path], tmp_path: Path
) -> None:
    draw = random.Random(3000 + number)
    with teacher_server(models["teacher"]) as server:
        run = drawn_run(tmp_path, models, number, draw, server.url, temperature=1.0)
        with passes(number, draw):
            loop.train(run, run / "training")
    AcceleratorState._reset_state(reset_partial_state=True)
    assert sum(path == "/v1/completions" for path, _ in server.said) > 2, "more than what is asked before the training"
    assert_plain(run)


@pytest.mark.slow
@pytest.mark.parametrize("number", [*NUMBERS[:4], *NUMBERS[FEW : 2 * FEW]])
def test_a_training_with_teachers_of_sources_is_that_of_plain_loops(
    number: int, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other one samples ahead, from servers on a virtual clock."""
    draw = random.Random(4000 + number)
    monkeypatch.setattr("grpo_core.training.session.make_engine", virtual_servers)
    ahead = {"engine": "vllm-server", "max_staleness": 2, "vllm_importance_sampling_correction": True}
    run = drawn_run(tmp_path, models, number, draw, by_source=True, **(ahead if number % 2 else {}))
    with passes(number, draw):
        loop.train(run, run / "training")
    AcceleratorState._reset_state(reset_partial_state=True)
    is_ahead = number % 2 == 1 and result_of(run)["counted"]["rollouts"] > 1
    assert any(step.get("sampling/staleness/max", 0) for step in metrics_of(run)) == is_ahead
    assert_plain(run)


@pytest.mark.served
def test_processes_share_what_a_teacher_behind_a_server_is_asked(models: dict[str, Path], tmp_path: Path) -> None:
    draw = random.Random(2)
    with teacher_server(models["teacher"]) as server:
        run = drawn_run(tmp_path, models, 2, draw, server.url, temperature=1.0, num_processes=2, dynamic_sample=False)
        in_processes(2, tmp_path / "group", lambda _: loop.train(run, run / "training"))
    assert_plain(run)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 4, *(pytest.param(number, marks=pytest.mark.e2e) for number in (0, 2, 5, 6, 7))])
def test_a_training_by_divergences_from_teachers_of_sources_is_that_of_plain_loops(
    number: int, models: dict[str, Path], tmp_path: Path
) -> None:
    draw = random.Random(6000 + number)
    run = drawn_run(tmp_path, models, number, draw, by_source=True, diverges=True)
    with passes(number, draw):
        loop.train(run, run / "training")
    AcceleratorState._reset_state(reset_partial_state=True)
    shown = [step["teacher_shown"] for step in metrics_of(run)]
    assert 0 < sum(shown) < len(shown), "some completions are of a source without a teacher"
    assert_plain(run)


@pytest.mark.served
@pytest.mark.parametrize("diverges", [False, True])
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_processes_share_what_teachers_of_sources_read(
    sharding: str, diverges: bool, models: dict[str, Path], tmp_path: Path
) -> None:
    draw, keys = random.Random(2), {"num_processes": 2, "sharding": sharding}
    run = drawn_run(tmp_path, models, 2, draw, by_source=True, diverges=diverges, **keys)
    in_processes(2, tmp_path / "group", lambda _: loop.train(run, run / "training"))
    assert_plain(run)


@pytest.mark.served
@pytest.mark.parametrize("number", NUMBERS)
def test_processes_with_whole_models_or_shares_train_as_plain_loops(
    number: int, models: dict[str, Path], tmp_path: Path
) -> None:
    draw = random.Random(1000 + number)
    w, sharding = 2, "full" if number % 3 else "none"
    if number >= FEW:
        w, sharding = draw.choice([(2, "full"), (3, "none"), (3, "full"), (4, "hybrid"), (8, "none")])
    run = drawn_run(tmp_path, models, number, draw, num_processes=w, sharding=sharding)

    def start(rank: int) -> None:
        os.environ["LOCAL_WORLD_SIZE"] = "2" if sharding == "hybrid" else str(w)
        loop.train(run, run / "training")

    with passes(number, draw):
        in_processes(w, tmp_path / "group", start)
    assert_plain(run)


@pytest.mark.served
@pytest.mark.parametrize("number", [1, 2, *(pytest.param(number, marks=pytest.mark.e2e) for number in (0, 4, 5, 6, 7))])
def test_processes_that_share_both_models_train_by_a_divergence_as_plain_loops(
    number: int, models: dict[str, Path], tmp_path: Path
) -> None:
    draw, w = random.Random(5000 + number), 2 + number % 2
    run = drawn_run(tmp_path, models, number, draw, diverges=True, num_processes=w, sharding="full")
    with passes(number, draw):
        in_processes(w, tmp_path / "group", lambda _: loop.train(run, run / "training"))
    assert_plain(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [3, 12, 20, *(pytest.param(number, marks=pytest.mark.e2e) for number in (6, 11, 14, 19, 22, 28, 35))],
)
def test_a_training_by_a_divergence_from_who_was_shown_more_is_that_of_plain_loops(
    number: int, models: dict[str, Path], tmp_path: Path
) -> None:
    """From a frozen model, the policy as it is in each update, or its average."""
    draw = random.Random(7100 + number)
    run = drawn_run(tmp_path, models, number, draw, diverges=True)
    with passes(number, draw):
        loop.train(run, run / "training")
    AcceleratorState._reset_state(reset_partial_state=True)
    assert any("teacher_divergence" in step for step in metrics_of(run))
    assert_plain(run)


@pytest.mark.served
@pytest.mark.parametrize("number", [4, 12, *(pytest.param(number, marks=pytest.mark.e2e) for number in (3, 6, 20, 28))])
def test_processes_that_share_the_policy_learn_by_a_divergence_from_it_as_plain_loops(
    number: int, models: dict[str, Path], tmp_path: Path
) -> None:
    draw = random.Random(8100 + number)
    run = drawn_run(tmp_path, models, number, draw, diverges=True, num_processes=2, sharding="full")
    with passes(number, draw):
        in_processes(2, tmp_path / "group", lambda _: loop.train(run, run / "training"))
    assert_plain(run)


@pytest.mark.served
def test_processes_without_a_row_keep_in_step_with_those_that_share_the_model(
    models: dict[str, Path], tmp_path: Path
) -> None:
    keys = {"num_processes": 3, "sharding": "full", "num_generations": 2, "per_device_train_batch_size": 2}
    values = config_values(models["tied"], tmp_path, **keys, gradient_accumulation_steps=1, **CALM)
    values["rewards"] = [{"function": f"{__name__}:silent"}]
    run = make_run(tmp_path / "run", values)
    in_processes(3, tmp_path / "group", lambda _: loop.train(run, run / "training"))
    assert any(0.6 < step["frac_reward_zero_std"] < 1 for step in metrics_of(run)), "one group of two is trained"
    assert_plain(run)
