"""Which models take packed batches, tried as a GPU tries them, and what is said of those that do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention

from grpo_core.config.inputs import ModelConfig
from grpo_core.model import packed_attention
from grpo_core.model.capabilities import make_packable
from grpo_core.model.loading import load_model, with_adapter
from grpo_core.model.policy import Policy
from grpo_core.model.precision import make_bfloat16, working_copy
from tests.conftest import make_model
from tests.plain_kernels import plain_varlen

VARLEN = packed_attention._varlen


def _with_lora(folder: Path) -> Any:
    return with_adapter(load_model(folder), ModelConfig(name_or_path=str(folder), use_peft=True, lora_r=4))


MODELS: dict[str, Callable[[Path], Any]] = {
    "trainable": load_model,
    "frozen": lambda folder: load_model(folder).requires_grad_(False),
    "lora": _with_lora,
    "bf16": lambda folder: working_copy(load_model(folder)),
    "bf16 lora": lambda folder: working_copy(_with_lora(folder)),
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, flex attention is plain torch except for a check; flash attention is missing."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(packed_attention, "varlen_attn", plain_varlen)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["varlen", "flex"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_every_model_of_a_training_packs_as_on_a_gpu(
    smooth_model_folder: Path, make: Callable[[Path], Any], kind: Any
) -> None:
    found, why = make_packable(make(smooth_model_folder), [kind])
    assert not why, why
    assert found == kind


def _fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("Failed to find C compiler.\n Please specify via CC environment variable")


@pytest.mark.slow
def test_a_kind_that_fails_gives_way_to_the_next(smooth_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "varlen_attn", _fails)
    kind, why = make_packable(load_model(smooth_model_folder), ["varlen", "flex"])
    assert kind == "flex"
    assert why == "varlen: RuntimeError: Failed to find C compiler. Please specify via CC environment variable"


def test_the_backward_pass_is_tried_too(smooth_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention.Repeat, "backward", _fails)
    model = load_model(smooth_model_folder)
    assert make_packable(model, ["varlen"])[0] is None
    assert make_packable(model.requires_grad_(False), ["varlen"])[0] == "varlen"


def test_why_none_is_taken_is_said_for_each(smooth_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same compiler's error, and a completion that sees the one before it instead of itself."""
    monkeypatch.setattr(packed_attention, "_block_mask", _fails)
    monkeypatch.setattr(packed_attention, "_varlen", _seeing_another)
    model = load_model(smooth_model_folder)
    kind, why = make_packable(model, ["varlen", "flex"])
    assert kind is None
    assert model.config._attn_implementation == "sdpa"
    first, second = why.split("; ")
    assert first.startswith("varlen: hidden states differ from a plain pass's by 0.")
    assert first.endswith(", and 0.0001 is allowed")
    assert second == ("flex: RuntimeError: Failed to find C compiler. Please specify via CC environment variable")


def test_the_policy_says_why_rows_are_padded(model_folder: Path, tmp_path: Path) -> None:
    assert Policy(load_model(model_folder), 1.0).why_not == ""
    window = load_model(make_model(tmp_path / "window", "Mistral", sliding_window=4))
    assert Policy(window, 1.0).why_not.startswith("a layer attends to a window")
    capped = load_model(make_model(tmp_path / "capped", "Gemma2", head_dim=16, final_logit_softcapping=2.0))
    assert Policy(capped, 1.0).why_not.startswith("its logits are not")


def test_memory_that_runs_out_is_no_answer(smooth_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def runs_out(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(packed_attention, "varlen_attn", runs_out)
    model = load_model(smooth_model_folder)
    with pytest.raises(torch.OutOfMemoryError):
        make_packable(model, ["varlen", "flex"])
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.slow
def test_a_deep_model_in_bfloat16_packs_and_a_wrong_kernel_still_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 28 layers, rounding alone moves hidden states by more than the tolerance of shallow models."""
    folder = make_model(tmp_path, num_hidden_layers=28, initializer_range=0.2, max_position_embeddings=256)
    model = make_bfloat16(load_model(folder))
    assert make_packable(model, ["padded"]) == ("padded", "")
    model.config._attn_implementation = "sdpa"
    monkeypatch.setattr(packed_attention, "_varlen", _seeing_another)
    assert make_packable(model, ["varlen"])[0] is None


def _seeing_another(*lengths: Any) -> Any:
    """What `_varlen` gives, except that the second completion reads the first one's keys instead of its own."""
    sequences = VARLEN(*lengths)
    keys, starts, queries = sequences.keys.clone(), sequences.key_starts, sequences.query_starts
    second, size = len(lengths[0]) + 1, int(queries[len(lengths[0]) + 1] - queries[len(lengths[0])])
    keys[int(starts[second + 1]) - size : int(starts[second + 1])] -= size
    return replace(sequences, keys=keys)
