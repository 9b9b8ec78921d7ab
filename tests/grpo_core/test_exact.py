"""What the loop leaves out changes nothing: its gradient is that of a plain padded float32 pass over all rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, Qwen2Config

from grpo_core import batching, head
from grpo_core.batching import MicroBatch, Sequences, concatenate, micro_batch
from grpo_core.data import training_order
from grpo_core.losses import token_losses
from grpo_core.policy import Policy
from grpo_core.progress import Progress
from grpo_core.session import Session, set_up
from grpo_core.trainer import roll_out
from grpo_core.update import update
from tests.conftest import config_values, make_run

BOUND = 1e-6  # relative


@pytest.fixture
def session(request: pytest.FixtureRequest, model_folder: Path, tmp_path: Path) -> Iterator[Session]:
    """Ready to train as the test's parameters say, gradients not clipped."""
    values = config_values(model_folder, tmp_path, max_grad_norm=1e9, **getattr(request, "param", {}))
    yield set_up(make_run(tmp_path / "run", values), None)
    AcceleratorState._reset_state(reset_partial_state=True)


def _batch(session: Session, silent: str) -> MicroBatch:
    """One update's rows; `silent`: which of their groups have no advantage."""
    rollout, _ = roll_out(session, 0, Progress(rows_per_pass=8))
    torch.manual_seed(0)
    advantages = torch.randn(len(rollout.advantages))
    groups = torch.arange(len(advantages)) // session.plan.num_generations
    silenced = {"none": groups < 0, "half": groups % 2 == 0, "all": groups >= 0}[silent]
    rollout = replace(rollout, advantages=advantages.masked_fill(silenced, 0.0))
    order = training_order(session.plan, 0, 0)[:, 0]
    parts = [micro_batch(rollout, rows.tolist(), session.plan, session.config, len(order)) for rows in order]
    return concatenate(parts)


def _gradients(session: Session) -> list[Tensor]:
    parameters = [p for group in session.optimizer.param_groups for p in group["params"]]
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]


def _updated(session: Session, batch: MicroBatch) -> list[Tensor]:
    """The gradient that the optimizer steps with."""
    found: list[Tensor] = []
    session.optimizer.step = lambda: found.extend(_gradients(session))  # type: ignore[method-assign]
    update(session, batch, Progress(rows_per_pass=8))
    assert found
    return found


def _plain(session: Session, batch: MicroBatch) -> list[Tensor]:
    """All rows at once, padded to the longest, all logits."""
    sequences, config = batch.sequences, session.config
    logits = session.model(input_ids=sequences.input_ids).logits / config.rollout.temperature
    logprobs = logits[:, :-1].log_softmax(-1).gather(2, sequences.input_ids[:, 1:, None]).squeeze(2)
    columns = sequences.prompt_lengths[:, None] - 1 + torch.arange(batch.mask.shape[1])
    chosen = logprobs.gather(1, columns.clamp(max=logprobs.shape[1] - 1))
    losses = token_losses(
        chosen,
        chosen.detach() if batch.old_logprobs is None else batch.old_logprobs,
        batch.mask,
        batch.advantages,
        config.algorithm,
        sampling_logprobs=batch.sampling_logprobs,
        ref_logprobs=batch.ref_logprobs,
    )
    session.optimizer.zero_grad()
    (batch.weights * losses.loss).sum().backward()
    gradients = _gradients(session)
    session.optimizer.zero_grad()
    return gradients


def _distance(found: list[Tensor], expected: list[Tensor]) -> float:
    found_, expected_ = (torch.cat([g.flatten().double() for g in gradients]) for gradients in (found, expected))
    return float((found_ - expected_).norm() / expected_.norm())


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "lora": {"use_peft": True, "lora_r": 4},
    "kl": {"beta": 0.1},
    "sequence ratios": {"importance_sampling_level": "sequence", "num_iterations": 2},
    "per completion": {"loss_type": "grpo"},
    "per micro-step": {"loss_type": "bnpo", "mask_truncated_completions": True},
    "several updates": {"steps_per_generation": 4, "loss_type": "cispo", "epsilon_high": 5.0},
}


@pytest.mark.parametrize("silent", ["none", "half"])
@pytest.mark.parametrize("session", OPTIONS.values(), ids=OPTIONS, indirect=True)
def test_an_update_s_gradient_is_the_plain_one(session: Session, silent: str) -> None:
    batch = _batch(session, silent)
    assert _distance(_updated(session, batch), _plain(session, batch)) < BOUND


@pytest.mark.parametrize("rows", [1, 3, 8, 100])
def test_the_token_budget_leaves_the_gradient_as_it_is(session: Session, rows: int) -> None:
    batch = _batch(session, "half")
    expected = _plain(session, batch)
    session.memory.rows = rows
    assert _distance(_updated(session, batch), expected) < BOUND


@pytest.mark.parametrize(("chunk", "kept"), [(200, 2**25), (200, 0), (60, 0)])
def test_logits_in_chunks_and_computed_again_leave_the_gradient_as_it_is(
    session: Session, monkeypatch: pytest.MonkeyPatch, chunk: int, kept: int
) -> None:
    monkeypatch.setattr(head, "CHUNK_LOGITS", chunk)
    monkeypatch.setattr(head, "KEPT_LOGITS", kept)
    batch = _batch(session, "none")
    assert _distance(_updated(session, batch), _plain(session, batch)) < BOUND


@pytest.mark.parametrize("rows", [2, 8, 100])
@pytest.mark.parametrize("session", OPTIONS.values(), ids=OPTIONS, indirect=True)
def test_a_prompt_computed_once_for_its_group_leaves_the_gradient_as_it_is(
    session: Session, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(batching, "SHARED_PROMPT", 1)
    batch, shared = _batch(session, "half"), []
    session.memory.rows = rows
    forward = session.policy.forward
    session.policy.forward = lambda s, **keys: shared.append(s.one_prompt) or forward(s, **keys)  # type: ignore[method-assign]
    assert _distance(_updated(session, batch), _plain(session, batch)) < BOUND
    assert any(shared) or session.config.algorithm.mask_truncated_completions  # which leaves few rows


def test_an_update_without_any_advantage_steps_with_a_gradient_of_zeros(session: Session) -> None:
    gradients = _updated(session, _batch(session, "all"))
    assert len(gradients) > 0
    assert all((gradient == 0).all() for gradient in gradients)


def test_rows_without_a_gradient_are_not_computed(session: Session) -> None:
    batch, seen = _batch(session, "half"), []
    forward = session.policy.forward
    session.policy.forward = lambda s, **keys: seen.append(len(s.input_ids)) or forward(s, **keys)  # type: ignore[method-assign]
    _updated(session, batch)
    assert sum(seen) == int((batch.advantages != 0).sum()) < len(batch.advantages)


@pytest.mark.parametrize("session", [{"beta": 0.1}, {"entropy_coef": 0.1}], ids=["kl", "entropy"], indirect=True)
def test_every_row_is_computed_where_each_has_a_gradient(session: Session) -> None:
    batch, seen = _batch(session, "all"), []
    forward = session.policy.forward
    session.policy.forward = lambda s, **keys: seen.append(len(s.input_ids)) or forward(s, **keys)  # type: ignore[method-assign]
    gradients = _updated(session, batch)
    assert sum(seen) == len(batch.advantages)
    assert any((gradient != 0).any() for gradient in gradients) == (session.config.algorithm.entropy_coef > 0)


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
    ("config", "plain_output", "shares"),
    [
        (Qwen2Config(**SIZES), True, True),
        (Qwen2Config(**SIZES, **WINDOW), True, False),
        (Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=2.0), False, False),
    ],
    ids=["plain", "window", "capped logits"],
)
def test_a_model_that_short_cuts_would_change_takes_none(config: Any, plain_output: bool, shares: bool) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=1.0)
    policy = Policy(model, 1.0)
    assert (policy.output_layer is not None, policy.shares_prompts) == (plain_output, shares)
    ids = torch.randint(1, 20, (3, 12))
    logprobs, entropy = policy(Sequences(ids, torch.full((3,), 5), torch.full((3,), 7)))
    expected = model(input_ids=ids).logits[:, 4:-1].log_softmax(-1)
    assert torch.allclose(logprobs, expected.gather(2, ids[:, 5:, None]).squeeze(2), atol=1e-5)
    assert torch.allclose(entropy, -(expected.exp() * expected).sum(-1), atol=1e-5)
