"""What a training and an evaluation say, once, about what they do in a slower or other way; they say nothing else."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from grpo_core.config.files import load_config
from grpo_core.evaluation.sampling import load_sampling
from grpo_core.model import packed_attention
from grpo_core.rollout.loading import fallbacks
from grpo_core.training.session import load_session
from tests.conftest import config_values, make_model, make_run
from tests.pretend_gpu import pretend_gpu

WINDOW = "a layer attends to a window of tokens only, or carries a state"
OWN = "its logits are not those of a linear layer alone"
PADDED = "prompts are computed again for each completion, and rows are padded: "
UNFUSED = f"a pass holds the logits of all its tokens together: {OWN}"
UNSHARED = "sampling keeps a prompt's keys and values once per completion: "
UNCAPTURED = (
    "sampling runs without CUDA graphs: RuntimeError: called a synchronizing CUDA operation, in "
    "transformers/modeling_rope_utils.py:"
)
SOFTCAP = "ValueError: a shared cache has plain causal attention only, Gemma2Attention has softcap"
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}}
CAPPED = {"head_dim": 16, "sliding_window": 4000, "final_logit_softcapping": 2.0}


def said_of(run: Path, values: dict[str, Any]) -> list[str]:
    session = load_session(make_run(run, values))
    AcceleratorState._reset_state(reset_partial_state=True)
    return without_line(fallbacks(session.sampler.engine, session.policy))


def without_line(notes: list[str]) -> list[str]:
    """Without transformers' line, which its next release may have elsewhere."""
    return [re.sub(r"(rope_utils\.py:)\d+, `if seq_len > .*`$", r"\1", note) for note in notes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "changes", "on_gpu", "expected"),
    [
        pytest.param("Qwen2", {}, False, [], id="plain, on a CPU"),
        pytest.param("Qwen2", {}, True, [], id="plain"),
        pytest.param("Llama", DYNAMIC, False, [], id="waits, on a CPU"),
        pytest.param("Llama", DYNAMIC, True, [UNCAPTURED], id="waits"),
        pytest.param("Mistral", {"sliding_window": 4}, False, [PADDED + WINDOW, UNSHARED + WINDOW], id="window"),
        pytest.param("Gemma2", CAPPED, False, [PADDED + OWN, UNFUSED, UNSHARED + SOFTCAP], id="capped"),
    ],
)
def test_each_kind_of_model_says_exactly_its_sentences(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    architecture: str,
    changes: dict[str, Any],
    on_gpu: bool,
    expected: list[str],
) -> None:
    folder = make_model(tmp_path / "model", architecture, **changes)
    values = config_values(folder, tmp_path)
    capsys.readouterr()
    with pretend_gpu() if on_gpu else nullcontext():
        assert said_of(tmp_path / "run", values) == expected
    assert without_line(capsys.readouterr().out.splitlines()) == expected


@pytest.mark.slow
def test_a_first_kind_of_attention_that_fails_is_said(
    smooth_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Failed to find C compiler.\n Please specify via CC environment variable")

    with pretend_gpu(), monkeypatch.context() as patch:
        patch.setattr(packed_attention, "varlen_attn", fails)
        found = said_of(tmp_path / "run", config_values(smooth_model_folder, tmp_path))
    assert found == [
        "prompts are computed once, by flex attention: varlen: RuntimeError: Failed to find C compiler. Please specify "
        "via CC environment variable"
    ]
    assert capsys.readouterr().out.splitlines() == found


def test_an_evaluation_says_how_it_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_model(tmp_path / "model", "Mistral", sliding_window=4)
    run = make_run(tmp_path / "run", config_values(folder, tmp_path))
    config = load_config(run / "config.toml")
    capsys.readouterr()
    session = load_sampling(config, {"held_out": run / "dataset" / "eval.parquet"}, 6)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert fallbacks(session.engine) == capsys.readouterr().out.splitlines() == [UNSHARED + WINDOW]
