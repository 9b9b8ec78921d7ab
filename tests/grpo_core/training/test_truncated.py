"""Sampling that leaves unlikely tokens out: the policy that is trained is the one that samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from grpo_core.config.files import parse_config
from grpo_core.fingerprint import determining
from grpo_core.model.loading import load_model
from grpo_core.rollout.sampling import draw, lowest_kept
from grpo_core.rollout.types import Sampling
from tests.conftest import make_model, with_keys
from tests.grpo_core.training.training import metrics_of, trained_run


@pytest.mark.parametrize(
    "keys", [{"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.1}, {"top_p": 0.9, "top_k": 5, "min_p": 0.05}], ids=str
)
def test_the_tokens_that_are_left_are_those_of_transformers(keys: dict[str, Any]) -> None:
    logits = 3 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    sampling, ids = Sampling(1, 1.0, **keys), torch.zeros(50, 1, dtype=torch.int64)
    left = MinPLogitsWarper(sampling.min_p)(ids, logits) if sampling.min_p else logits
    left = TopKLogitsWarper(sampling.top_k)(ids, left) if sampling.top_k else left
    left = TopPLogitsWarper(sampling.top_p)(ids, left) if sampling.top_p < 1 else left
    assert torch.equal(logits >= lowest_kept(logits, sampling)[:, None], left.isfinite())


@given(
    logits=st.lists(st.integers(-3, 3), min_size=1, max_size=12),
    top_k=st.integers(0, 6),
    top_p=st.sampled_from([0.3, 0.7, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_equal_logits_are_left_together_by_engine_and_trainer(
    logits: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    sampling, n = Sampling(1, 1.0, top_p=top_p, top_k=top_k, min_p=min_p), 4000
    rows = torch.tensor([logits], dtype=torch.float32)
    left = (rows >= lowest_kept(rows, sampling)[:, None])[0]
    token, logprob = draw(rows.expand(n, -1), (torch.arange(n) + 0.5) / n, sampling)
    expected = rows[0].masked_fill(~left, -torch.inf).log_softmax(-1)
    assert torch.allclose(logprob, expected[token], atol=1e-5)
    likely = expected.exp() > 2 / n
    assert {*token.tolist()} >= {*likely.nonzero().flatten().tolist()}


@pytest.mark.parametrize("keys", [{"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.1}])
def test_runs_that_an_earlier_loss_has_trained_are_made_again(values: dict[str, Any], keys: dict[str, Any]) -> None:
    """Their identity was that of the values alone, as that of other runs is."""
    whole, truncated = (determining(parse_config(with_keys(values, **given)))["rollout"] for given in ({}, keys))
    assert truncated.keys() - whole.keys() - keys.keys(), "what runs with these keys depend on has changed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("Qwen2", {"top_k": 8, "beta": 0.1}),
        pytest.param("Qwen2", {"top_p": 0.6, "use_peft": True, "beta": 0.1}, id="LoRA"),
        pytest.param("Gemma2", {"top_p": 0.95, "min_p": 0.1, "entropy_coef": 0.01}, id="own logits"),
    ],
)
def test_on_policy_the_trainer_s_probabilities_are_those_that_sampled(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], architecture: str, keys: dict[str, Any]
) -> None:
    more = {"head_dim": 32, "final_logit_softcapping": 4.0} if architecture == "Gemma2" else {}
    folder = make_model(tmp_path / "model", architecture, num_hidden_layers=1, **more)
    run = trained_run(tmp_path / "run", with_keys(values, name_or_path=str(folder), temperature=0.9, **keys))
    first, *others = metrics_of(run)
    assert first["sampling/outside_share"] == 0
    assert others and not any("sampling/outside_share" in row for row in others)
    assert "the trainer would leave out 0.00% of the tokens that were sampled first" in capsys.readouterr().out
    for row in [first, *others]:
        assert row["log_ratio/max"] < 1e-4
        assert row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)
    if "beta" in keys:  # the KL of what is left from the whole reference, which is the same policy at first
        assert first["kl"] > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["plain", "own logits"])
def test_sampled_tokens_that_the_trainer_would_leave_out_are_counted(
    values: dict[str, Any], tmp_path: Path, folder: str
) -> None:
    """A repetition penalty, which is the engine's alone, makes some."""
    kind, more = ("Qwen2", {}) if folder == "plain" else ("Gemma2", {"head_dim": 32, "final_logit_softcapping": 4.0})
    base = make_model(tmp_path / "model", kind, num_hidden_layers=1, initializer_range=0.2, **more)
    keys = {"top_k": 2, "repetition_penalty": 3.0, "temperature": 0.9, "max_steps": 1}
    run = trained_run(tmp_path / "run", with_keys(values, name_or_path=str(base), **keys))
    model, outside, tokens = load_model(base).double(), 0, 0
    for row in pq.read_table(next((run / "training" / "completions").glob("*.parquet"))).to_pylist():
        prompt, completion = row["prompt_ids"], row["completion_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        second = logits.topk(2).values[:, 1]
        outside += int((logits.gather(1, torch.tensor(completion)[:, None])[:, 0] < second).sum())
        tokens += len(completion)
    found = metrics_of(run)[0]["sampling/outside_share"]
    assert 0 < found < 1
    assert found == pytest.approx(outside / tokens, abs=1e-6)
