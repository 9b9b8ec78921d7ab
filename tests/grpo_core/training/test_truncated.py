"""Sampling that leaves unlikely tokens out: the policy that is trained is the one that samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from grpo_core.config.files import parse_config
from grpo_core.fingerprint import determining
from grpo_core.rollout.sampling import lowest_kept
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
