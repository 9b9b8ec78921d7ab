"""What the loop leaves out changes nothing: its gradient is that of a plain padded float32 pass over all rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, Gemma2Config, Qwen2Config

from grpo_core.model import policy
from grpo_core.model.policy import Policy
from grpo_core.model.sequences import Sequences
from grpo_core.training.batch import MicroBatch
from grpo_core.training.session import Session, load_session
from grpo_core.training.state import TrainingState
from grpo_core.training.update import update
from tests.conftest import config_values, make_run
from tests.grpo_core.model.exactness import (
    distance,
    first_update,
    gradient_and_metrics,
    move,
    plain_entropy,
    plain_gradient,
    plain_logprobs,
    rollout_with,
    updating_gradient,
)

BOUND = 3e-6  # relative; float32 rounds to 6e-8, and processors add in different orders


@pytest.fixture
def session(request: pytest.FixtureRequest, smooth_model_folder: Path, tmp_path: Path) -> Iterator[Session]:
    """Ready to train as the test's parameters say, gradients not clipped."""
    values = config_values(smooth_model_folder, tmp_path, max_grad_norm=1e9, **getattr(request, "param", {}))
    yield load_session(make_run(tmp_path / "run", values))
    AcceleratorState._reset_state(reset_partial_state=True)


def _batch(session: Session, silent: str) -> MicroBatch:
    """One update's rows; `silent`: which of their groups have no advantage."""
    torch.manual_seed(0)
    advantages = torch.randn(session.plan.generation_batch_size)
    groups = torch.arange(len(advantages)) // session.plan.num_generations
    silenced = {"none": groups < 0, "half": groups % 2 == 0, "all": groups >= 0}[silent]
    return first_update(session, rollout_with(session, advantages.masked_fill(silenced, 0.0)))


@pytest.mark.slow
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(
    "session", [{"num_iterations": 2, "beta": 0.1, "vllm_importance_sampling_mode": "token_truncate"}], indirect=True
)
def test_an_update_s_figures_are_those_of_all_its_tokens(session: Session, sign: int) -> None:
    """Every advantage has the sign, and every ratio is on the side that the clip bounds there."""
    batch = _batch(session, "none")
    session.memory.tokens = 3 * int(batch.sequences.lengths.max())
    move(session)
    with torch.no_grad():
        logprobs = plain_logprobs(session, batch)
        old = logprobs - sign * torch.rand_like(logprobs)
        sampling = old + 0.1 * torch.randn_like(logprobs)
        entropy = plain_entropy(session, batch)
    batch = replace(batch, advantages=sign * batch.advantages.abs(), old_logprobs=old, sampling_logprobs=sampling)
    _, metrics = gradient_and_metrics(session, batch)

    assert batch.ref_logprobs is not None
    inside = batch.mask > 0
    ratio, distance_to_reference = (logprobs - old).exp(), batch.ref_logprobs - logprobs
    clipped = inside & ((ratio < 0.8) | (ratio > 1.2))
    by_completion = clipped.sum(1) / inside.sum(1)
    differences = (old - sampling)[inside]
    expected = {
        "entropy": entropy,
        "kl": (ratio * (distance_to_reference.exp() - distance_to_reference - 1))[inside].mean(),
        "clip_ratio/region_mean": clipped[inside].float().mean(),
        "clip_ratio/low_mean": clipped[inside].float().mean() if sign < 0 else 0,
        "clip_ratio/low_min": by_completion.min() if sign < 0 else 0,
        "clip_ratio/high_mean": clipped[inside].float().mean() if sign > 0 else 0,
        "clip_ratio/high_max": by_completion.max() if sign > 0 else 0,
        "log_ratio/max": (logprobs - sampling)[inside].abs().max(),
        "sampling/sampling_logp_difference/mean": differences.abs().mean(),
        "sampling/sampling_logp_difference/max": differences.abs().max(),
        "sampling/importance_sampling_ratio/mean": differences.exp().mean(),
        "sampling/importance_sampling_ratio/min": differences.exp().min(),
        "sampling/importance_sampling_ratio/max": differences.exp().max(),
    }
    assert 0 < by_completion.min() < by_completion.max()
    assert {name: metrics[name] for name in expected} == pytest.approx(
        {name: float(v) for name, v in expected.items()}, rel=1e-4
    )


ADAPTIVE = {"use_adaptive_entropy": True, "entropy_target": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("silent", ["none", "half", "all"])
@pytest.mark.parametrize(
    "session",
    [ADAPTIVE, {**ADAPTIVE, "num_iterations": 2}, {**ADAPTIVE, "top_entropy_quantile": 0.5}],
    ids=["on-policy", "off-policy", "of high entropy"],
    indirect=True,
)
def test_an_adaptive_bonus_measures_the_entropy_of_all_completions_at_work_and_at_rest(
    session: Session, silent: str
) -> None:
    batch = _batch(session, silent)
    entropy = plain_entropy(session, batch).item()
    for last_entropy, coef in ((math.inf, 0.0), (0.5, 0.2)):
        progress = TrainingState(tokens_per_pass=100, entropy_coef=0.2, last_entropy=last_entropy)
        gradient, metrics = gradient_and_metrics(session, batch, progress)
        assert metrics["entropy_coef"] == coef
        assert metrics["kept_entropy"] == pytest.approx(entropy, rel=1e-5)
        if silent != "all":
            assert distance(gradient, plain_gradient(session, batch, entropy_coef=coef)) < BOUND


@pytest.mark.parametrize("session", [{}, {"gradient_checkpointing": True}], ids=["kept", "recomputed"], indirect=True)
def test_a_line_has_each_token_once(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, tokens, states = _batch(session, "none"), [], policy.packed_states
    monkeypatch.setattr(
        policy, "packed_states", lambda d, line: tokens.append(len(line.positions[0])) or states(d, line)
    )
    session.memory.tokens = 1000
    assert distance(updating_gradient(session, batch), plain_gradient(session, batch)) < BOUND
    rows = zip(batch.sequences.input_ids.tolist(), batch.sequences.prompt_lengths, strict=True)
    prompts = {tuple(ids[:length]) for ids, length in rows}
    assert len(prompts) < len(batch.mask)
    assert tokens == [sum(map(len, prompts)) + int((batch.sequences.completion_lengths - 1).sum())]


def test_an_update_without_any_advantage_steps_with_a_gradient_of_zeros(session: Session) -> None:
    gradients = updating_gradient(session, _batch(session, "all"))
    assert len(gradients) > 0
    assert all((gradient == 0).all() for gradient in gradients)


def test_rows_without_a_gradient_are_not_computed(session: Session) -> None:
    batch, seen = _batch(session, "half"), []
    forward = session.policy.forward
    session.policy.forward = lambda i, **keys: seen.append(i.shape[0]) or forward(i, **keys)  # type: ignore[method-assign]
    updating_gradient(session, batch)
    assert sum(seen) == int((batch.advantages != 0).sum()) < len(batch.advantages)


@pytest.mark.parametrize("session", [{"beta": 0.1}, {"entropy_coef": 0.1}], ids=["kl", "entropy"], indirect=True)
def test_every_row_is_computed_where_each_has_a_gradient(session: Session) -> None:
    batch, seen = _batch(session, "all"), []
    forward = session.policy.forward
    session.policy.forward = lambda i, **keys: seen.append(i.shape[0]) or forward(i, **keys)  # type: ignore[method-assign]
    gradients = updating_gradient(session, batch)
    assert sum(seen) == len(batch.advantages)
    assert any((gradient != 0).any() for gradient in gradients) == (session.config.algorithm.entropy_coef > 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("session", "every"),
    [
        ({}, False),
        ({"off_policy_mask_threshold": 0.01}, False),
        ({"entropy_coef": 0.1}, True),
        ({"use_adaptive_entropy": True}, True),
        ({"top_entropy_quantile": 0.5}, True),
        ({"beta": 0.1}, True),
    ],
    indirect=["session"],
)
def test_old_log_probabilities_that_nothing_reads_are_not_computed(session: Session, every: bool) -> None:
    session = replace(session, plan=replace(session.plan, num_iterations=2))
    seen: list[int] = []
    forward = session.policy.forward
    session.policy.forward = lambda i, **keys: seen.append(i.shape[0]) or forward(i, **keys)  # type: ignore[method-assign]
    advantages = torch.tensor([0.0, 1.0, -1.0, 0.0]).repeat(session.plan.generation_batch_size // 4)
    rollout_with(session, advantages)
    assert sum(seen) - len(session.sampler.probe.sequences) == (len(advantages) if every else len(advantages) // 2)


def test_an_off_policy_update_without_any_advantage_has_figures(session: Session) -> None:
    session = replace(session, plan=replace(session.plan, num_iterations=2))
    metrics = update(session, _batch(session, "all"), TrainingState(tokens_per_pass=100))
    assert metrics["entropy"] > 0
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
    assert metrics["sampling/importance_sampling_ratio/max"] == pytest.approx(1, abs=1e-4)


SIZES = {
    "vocab_size": 20,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}


@pytest.mark.parametrize(
    ("config", "plain_output", "packs"),
    [
        (Qwen2Config(**SIZES), True, True),
        (Qwen2Config(**SIZES, **WINDOW), True, False),
        (Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=2.0), False, False),
    ],
    ids=["plain", "window", "capped logits"],
)
def test_a_model_that_short_cuts_would_change_takes_none(config: Any, plain_output: bool, packs: bool) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=1.0)
    policy = Policy(model, 1.0)
    assert (policy.output_layer is not None, policy.packs) == (plain_output, packs)
    ids = torch.randint(1, 20, (3, 12))
    sequences = Sequences(ids, torch.full((3,), 5), torch.full((3,), 7), torch.arange(3))
    logprobs, entropy = policy(policy.prepare(sequences))
    expected = model(input_ids=ids).logits[:, 4:-1].log_softmax(-1)
    assert torch.allclose(logprobs, expected.gather(2, ids[:, 5:, None]).squeeze(2), atol=1e-5)
    assert torch.allclose(entropy, -(expected.exp() * expected).sum(-1), atol=1e-5)
