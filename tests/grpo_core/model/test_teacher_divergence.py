"""The divergence between a teacher's distributions and the policy's: TRL's, in chunks of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_core.model import logprobs
from grpo_core.model.logprobs import Taught, float32_product, generalised_jsd, outcomes, teacher_divergence

TEMPERATURE = 0.7
BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]


def _logits() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    policy, teacher = torch.randn(2, 9, 40, generator=generator, dtype=torch.float64) * 3
    return policy.requires_grad_(), teacher


@pytest.mark.parametrize("beta", BETAS)
def test_a_divergence_over_the_vocabulary_and_its_gradient_are_trls(beta: float) -> None:
    gkd = pytest.importorskip("trl.experimental.gkd.gkd_trainer").GKDTrainer.generalized_jsd_loss
    policy, teacher = _logits()
    theirs = gkd(policy, teacher, beta=beta, temperature=TEMPERATURE, reduction="none").sum(-1)
    ours = generalised_jsd(*(outcomes(logits / TEMPERATURE, None) for logits in (policy, teacher)), beta)
    _assert_same(ours, theirs, policy)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("k", [1, 5, 20])
def test_a_divergence_on_the_teachers_likeliest_tokens_and_its_gradient_are_trls(beta: float, k: int) -> None:
    """As SDFT has it with a teacher's top k and `distillation_add_tail`, where no tail is below 1e-7, its least."""
    trl = pytest.importorskip("trl.experimental.sdft.loss_utils")
    policy, teacher = _logits()
    top = teacher.topk(k).indices
    of_top = [trl.add_tail_bucket(each.log_softmax(-1).gather(1, top)) for each in (policy, teacher)]
    ours = generalised_jsd(outcomes(policy, top), outcomes(teacher, top), beta)
    _assert_same(ours, trl.compute_divergence(*of_top, beta), policy)


def _assert_same(ours: Tensor, theirs: Tensor, policy: Tensor) -> None:
    weights = torch.linspace(0.1, 1.0, len(ours), dtype=ours.dtype)
    assert ours.tolist() == pytest.approx(theirs.tolist(), rel=1e-6, abs=1e-8)
    (found,), (expected,) = (torch.autograd.grad((weights * each).sum(), policy) for each in (ours, theirs))
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunks_of_states_give_the_values_and_gradients_of_plain_float64_logits(
    chunk: int, k: int, beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a teacher of another width, whose further rows are left out."""
    monkeypatch.setattr(logprobs, "chunk_tokens", lambda *_: chunk)
    seen: list[int] = []
    monkeypatch.setattr(logprobs, "float32_product", lambda h, w: seen.append(len(h)) or float32_product(h, w))
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 16, requires_grad=True), torch.randn(30, 16, requires_grad=True)
    taught = Taught(torch.randn(7, 24), torch.randn(33, 24), beta, k)
    targets, weights = torch.arange(7), torch.linspace(-1, 1, 7)
    found, chosen = teacher_divergence(hidden, weight, targets, TEMPERATURE, taught)
    assert not chosen.requires_grad
    gradients = torch.autograd.grad((weights * found).sum(), (hidden, weight))
    assert max(seen) == min(chunk, 7)

    exact = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    p = (exact[0] @ exact[1].T / TEMPERATURE).softmax(-1)
    q = (taught.hidden.double() @ taught.weight[:30].double().T / TEMPERATURE).softmax(-1)
    assert torch.allclose(chosen.double(), q.log()[range(7), targets], rtol=1e-5)
    expected = torch.stack([_plain(*of_token, beta, k) for of_token in zip(p, q, strict=True)])
    assert torch.allclose(found.double(), expected, rtol=2e-5, atol=1e-6)
    for ours, theirs in zip(gradients, torch.autograd.grad((weights * expected).sum(), exact), strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()


def _plain(p: Tensor, q: Tensor, beta: float, k: int) -> Tensor:
    """The formulas of GKD's paper, token by token."""
    if k:
        order = q.argsort(descending=True)
        p, q = (torch.cat([each[order[:k]], each[order[k:]].sum()[None]]) for each in (p, q))
    kl: Any = lambda a, b: (a * (a / b).log()).sum()  # noqa: E731
    if beta in (0, 1):
        return kl(p, q) if beta else kl(q, p)
    m = beta * q + (1 - beta) * p
    return beta * kl(q, m) + (1 - beta) * kl(p, m)
