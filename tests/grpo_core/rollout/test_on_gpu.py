"""The transformers engine on a GPU, pretended: what a step waits for, what is captured, and what is said otherwise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from grpo_core.model.loading import load_model
from grpo_core.rollout import transformers_engine as engine_module
from grpo_core.rollout.group_cache import GroupCache
from grpo_core.rollout.transformers_engine import TransformersEngine
from grpo_core.rollout.types import Completion, Request, Sampling
from grpo_core.training.interrupt import Stopped
from tests.conftest import make_model
from tests.grpo_core.rollout.sampling import sampled
from tests.pretend_gpu import Gpu, pretend_gpu

THETA = {"rope_theta": 10_000.0}
LONG = {"original_max_position_embeddings": 32, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
CAPTURED: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {"head_dim": 16, "num_key_value_heads": 2}),
    "YaRN": ("Llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, **THETA}}),
}
WAITING: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("Phi3", {"rope_parameters": {"rope_type": "longrope", **LONG, **THETA}}),
    "dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **THETA}}),
}
WAITS = r"sampling runs without CUDA graphs: RuntimeError: called a synchronizing CUDA operation, in transformers/"


def made(folder: Path, name: str, **changes: Any) -> tuple[Any, Any]:
    """A model and its tokenizer."""
    folder = make_model(folder / name, name, max_position_embeddings=256, **changes)
    return load_model(folder), AutoTokenizer.from_pretrained(folder)


def long_answers(engine: TransformersEngine) -> list[Completion]:
    """Completions of 14 to 70 tokens, some of which join later and leave earlier than others."""
    engine.end_ids = torch.tensor([], dtype=torch.int64)
    requests = [Request([3 + n, 4, 5][: 1 + n % 3], 1 + n % 3, 100 * n, 14 * (n + 1)) for n in range(5)]
    return sampled(engine.generate(requests, Sampling(70, 1.5)))


def assert_alike(found: list[Completion], expected: list[Completion]) -> None:
    assert [each.ids for each in found] == [each.ids for each in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


@pytest.mark.slow
def test_captured_steps_sample_what_a_cpu_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MAX_ROWS", 5)
    model, tokenizer = made(tmp_path, "Qwen2")
    expected = long_answers(TransformersEngine(model, tokenizer))
    with pretend_gpu() as gpu:
        engine = TransformersEngine(model.to("cuda"), tokenizer)
        gpu.graphs.captures, sets = 0, list[Tensor]()
        decode = GroupCache.decode

        def noting(cache: GroupCache, token: Tensor) -> Tensor:
            if not sets or sets[-1] is not cache.group:
                sets.append(cache.group)
            return decode(cache, token)

        monkeypatch.setattr(GroupCache, "decode", noting)
        assert_alike(long_answers(engine), expected)
        assert gpu.graphs.captures == len(sets) > 4, "one for each set of rows, however many tokens it draws"
        assert not gpu.graphs.broken
        assert not gpu.mismatches


@pytest.mark.slow
@pytest.mark.parametrize("name", CAPTURED)
def test_a_model_whose_step_does_not_wait_is_captured_and_nothing_is_said(name: str, tmp_path: Path) -> None:
    architecture, changes = CAPTURED[name]
    model, tokenizer = made(tmp_path, architecture, **changes)
    with pretend_gpu() as gpu:
        engine = TransformersEngine(model.to("cuda"), tokenizer)
        assert (engine.shares_cache, engine.captures, engine.notes) == (True, True, [])
        assert not gpu.graphs.broken


@pytest.mark.slow
@pytest.mark.parametrize("name", WAITING)
def test_a_model_whose_step_waits_shares_its_cache_and_is_never_captured(name: str, tmp_path: Path) -> None:
    """One failed capture, and torch's allocator would give no memory back any more."""
    architecture, changes = WAITING[name]
    model, tokenizer = made(tmp_path, architecture, **changes)
    expected = long_answers(TransformersEngine(model, tokenizer))
    with pretend_gpu() as gpu:
        engine = TransformersEngine(model.to("cuda"), tokenizer)
        assert (engine.shares_cache, engine.captures, gpu.graphs.mode) == (True, False, 0)
        [note] = engine.notes
        assert re.fullmatch(WAITS + r"modeling_rope_utils\.py:\d+, `if seq_len > .*`", note)
        assert_alike(long_answers(engine), expected)
        assert gpu.graphs.captures == 0


def test_a_capture_that_fails_all_the_same_leaves_the_shared_cache(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's debug mode does not see every wait."""
    with pretend_gpu() as gpu:
        monkeypatch.setattr(gpu.graphs, "begun", lambda: gpu.graphs.wait("in a kernel of its own"))
        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        engine = TransformersEngine(load_model(model_folder, device="cuda"), tokenizer)
        assert (engine.shares_cache, engine.captures, gpu.graphs.captures) == (True, False, 1)
        assert engine.notes == [
            "sampling runs without CUDA graphs: RuntimeError: CUDA error: operation not permitted when stream is "
            "capturing (in a kernel of its own)"
        ]


def test_a_stop_between_the_beginning_of_a_capture_and_its_block_ends_the_capture(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> None:
        raise Stopped

    with pretend_gpu() as gpu:
        model = load_model(model_folder, device="cuda")
        cache = GroupCache(model, [[3, 4]], [2], max_tokens=4, captures=True)
        with torch.no_grad():
            token = cache.prefill().argmax(-1)
            monkeypatch.setattr(gpu.graphs, "begun", stop)
            with pytest.raises(Stopped):
                cache.decode(token)
        assert gpu.graphs.capturing is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "changes", "why"),
    [
        ("Mistral", {"sliding_window": 4}, "a layer attends to a window of tokens only, or carries a state"),
        (
            "Gemma2",
            {"head_dim": 32, "sliding_window": 4000, "attn_logit_softcapping": 2.0},
            "ValueError: a shared cache has plain causal attention only, Gemma2Attention has softcap",
        ),
    ],
)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_why_prompts_are_not_shared_is_said(
    tmp_path: Path, architecture: str, changes: dict[str, Any], why: str, on_gpu: bool
) -> None:
    model, tokenizer = made(tmp_path, architecture, **changes)
    with pretend_gpu():
        engine = TransformersEngine(model.to("cuda") if on_gpu else model, tokenizer, max_length=300)
    assert engine.notes == [f"sampling keeps a prompt's keys and values once per completion: {why}"]
    assert not engine.captures


def test_a_wrong_cache_is_not_shared_and_how_wrong_it_is_is_said(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = GroupCache._forward
    monkeypatch.setattr(GroupCache, "_forward", lambda *arguments: 1.01 * plain(*arguments))
    engine = TransformersEngine(load_model(model_folder), AutoTokenizer.from_pretrained(model_folder))
    assert engine.notes == [
        "sampling keeps a prompt's keys and values once per completion: logits differ from a plain pass's by 0.01, and "
        "0.0001 is allowed"
    ]


@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_memory_that_runs_out_says_nothing_about_the_cache(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def runs_out(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(GroupCache, step, runs_out)
    with pretend_gpu():
        model, tokenizer = load_model(model_folder, device="cuda"), AutoTokenizer.from_pretrained(model_folder)
        with pytest.raises(torch.OutOfMemoryError):
            TransformersEngine(model, tokenizer)


def waits_per_token(gpu: Gpu, model: Any, tokenizer: Any, completions: int, sampling: Sampling) -> float:
    """Waits of the host per step in which no completion joins or leaves."""
    model.generation_config.eos_token_id = tokenizer.eos_token_id = None
    engine = TransformersEngine(model, tokenizer)
    engine.end_ids = torch.tensor([], dtype=torch.int64)
    steps = engine.generate([Request([3, 4], completions, 0)], sampling)
    for _ in range(2):
        next(steps)
    gpu.waits.clear()
    for _ in range(4):
        next(steps)
    assert not gpu.mismatches
    return len(gpu.waits) / 4


@pytest.mark.slow
def test_a_step_waits_once_for_the_rows_that_go_on_and_once_for_their_stop_texts(model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    with pretend_gpu() as gpu:
        model = load_model(model_folder, device="cuda")
        found = {
            (rows, stop): waits_per_token(gpu, model, tokenizer, rows, Sampling(20, 1.0, stop=stop))
            for rows in (2, 64)
            for stop in ((), ("1+1=9",))
        }
    assert found == {(2, ()): 1, (64, ()): 1, (2, ("1+1=9",)): 2, (64, ("1+1=9",)): 2}
