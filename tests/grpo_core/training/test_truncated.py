"""Sampling that leaves unlikely tokens out: how far it is from the distribution that the loss uses is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from grpo_core.rollout.sampling import kept_probability
from grpo_core.rollout.types import Sampling
from tests.conftest import make_model, with_keys
from tests.grpo_core.training.training import metrics_of, trained_run


def _kept(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """By transformers' own processors."""
    left, ids = logits, torch.zeros(len(logits), 1, dtype=torch.int64)
    if sampling.min_p:
        left = MinPLogitsWarper(sampling.min_p)(ids, left)
    if sampling.top_k:
        left = TopKLogitsWarper(sampling.top_k)(ids, left)
    if sampling.top_p < 1:
        left = TopPLogitsWarper(sampling.top_p)(ids, left)
    return torch.where(left.isinf(), 0.0, logits.softmax(-1)).sum(-1)


@pytest.mark.parametrize(
    "keys", [{"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.1}, {"top_p": 0.9, "top_k": 5, "min_p": 0.05}], ids=str
)
def test_the_probability_that_is_left_is_that_of_transformers(keys: dict[str, Any]) -> None:
    logits = 3 * torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(1, 1.0, **keys)
    torch.testing.assert_close(kept_probability(logits, sampling), _kept(logits, sampling))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "keys"),
    [("Qwen2", {"top_k": 8}), pytest.param("Gemma2", {"top_p": 0.95, "min_p": 0.1}, id="own logits")],
)
def test_the_share_of_tokens_that_are_sampled_too_often_is_said_once(
    values: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    architecture: str,
    keys: dict[str, Any],
) -> None:
    more = {"head_dim": 32, "final_logit_softcapping": 4.0} if architecture == "Gemma2" else {}
    folder = make_model(tmp_path / "model", architecture, num_hidden_layers=1, **more)
    run = trained_run(tmp_path / "run", with_keys(values, name_or_path=str(folder), temperature=0.9, **keys))
    model = AutoModelForCausalLM.from_pretrained(folder)
    sampling, kept = Sampling(1, 0.9, **keys), []
    for row in pq.read_table(run / "training" / "completions" / "rollout-000000.parquet").to_pylist():
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1] / 0.9
        kept += _kept(logits, sampling).tolist()
    share = sum(1 / value > 1.1 for value in kept) / len(kept)
    assert 0 < share < 1
    first, *others = metrics_of(run)
    assert first["sampling/truncated_share"] == pytest.approx(share, abs=1e-9)
    assert others and not any("sampling/truncated_share" in row for row in others)
    said = f"{share:.1%} of the first generation batch's tokens were sampled with a probability more than 10% above"
    assert said in capsys.readouterr().out
