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


POLICY = [[1.5, -0.5, 0.25, 2.0, -1.0], [-2.0, 0.5, 3.0, 0.0, 1.0]]
TEACHER = [[0.5, 1.0, -1.5, 2.5, 0.0], [1.0, -0.5, 2.0, 0.75, -3.0]]
# Values, and the gradient of their sum, of these logits at this temperature, by TRL 1.16 (experimental) in float64:
# over the vocabulary by GKDTrainer.generalized_jsd_loss, on the teacher's top k by sdft's add_tail_bucket and
# compute_divergence. DistillationTrainer's _chunked_divergence_loss gives those over the vocabulary, in float32, within
# 1e-6. By (beta, k).
TRL: dict[tuple[float, int], tuple[list[float], list[float]]] = {
    (0.0, 0): (
        [0.3357404, 0.976379],
        [
            0.3654094,
            -0.1140586,
            0.06877,
            -0.2990071,
            -0.0211137,
            -0.2373459,
            0.0085448,
            0.3039157,
            -0.1489092,
            0.0737946,
        ],
    ),
    (0.3, 0): (
        [0.0718977, 0.099186],
        [
            0.0802737,
            -0.0155402,
            0.0156129,
            -0.0765456,
            -0.0038008,
            -0.0031052,
            0.0001305,
            0.0046417,
            -0.0165186,
            0.0148515,
        ],
    ),
    (1.0, 0): (
        [0.4917215, 0.4549794],
        [
            0.5895425,
            -0.0550451,
            0.1767207,
            -0.6929757,
            -0.0182424,
            -0.0060592,
            -0.006877,
            -0.2445981,
            -0.04805,
            0.3055844,
        ],
    ),
    (0.0, 2): (
        [0.2910375, 0.7803286],
        [
            0.3454324,
            -0.1140586,
            0.0579212,
            -0.2990071,
            0.0097121,
            -0.2373459,
            -0.0188462,
            0.3039157,
            -0.009226,
            -0.0384976,
        ],
    ),
    (0.3, 2): (
        [0.0610889, 0.0655442],
        [
            0.0755435,
            -0.0154923,
            0.0126669,
            -0.0748421,
            0.002124,
            -0.0030925,
            -0.0049606,
            0.0206145,
            -0.0024284,
            -0.0101331,
        ],
    ),
    (1.0, 2): (
        [0.3681669, 0.2008735],
        [
            0.5314899,
            -0.0519694,
            0.0891188,
            -0.5835825,
            0.0149432,
            -0.0057983,
            -0.0225296,
            0.0853788,
            -0.0110292,
            -0.0460218,
        ],
    ),
}


@pytest.mark.parametrize(("beta", "k"), TRL)
def test_a_divergence_and_its_gradient_are_those_of_trl(beta: float, k: int) -> None:
    values, gradient = TRL[beta, k]
    policy, teacher = (torch.tensor(logits, dtype=torch.float64) / TEMPERATURE for logits in (POLICY, TEACHER))
    policy.requires_grad_()
    top = teacher.topk(k).indices if k else None
    found = generalised_jsd(outcomes(policy, top), outcomes(teacher, top), beta)
    assert found.tolist() == pytest.approx(values, abs=1e-6)
    (slopes,) = torch.autograd.grad(found.sum(), policy)
    assert (slopes / TEMPERATURE).flatten().tolist() == pytest.approx(gradient, abs=1e-6)
    logits, states = (torch.tensor(each, requires_grad=True) for each in (POLICY, torch.eye(2).tolist()))
    # States of one token each.
    taught = Taught(torch.arange(2), torch.eye(2), torch.tensor(TEACHER).T.contiguous(), beta, k)
    found, _ = teacher_divergence(states, logits.T, torch.zeros(2, dtype=torch.int64), TEMPERATURE, [taught])
    found.sum().backward()
    assert found.tolist() == pytest.approx(values, abs=1e-6)
    assert logits.grad is not None
    assert logits.grad.flatten().tolist() == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunks_of_states_give_the_values_and_gradients_of_plain_float64_logits(
    chunk: int, k: int, beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two teachers of other widths, and with more rows, which are left out. One token has none."""
    monkeypatch.setattr(logprobs, "chunk_tokens", lambda *_: chunk)
    seen: list[int] = []
    monkeypatch.setattr(logprobs, "float32_product", lambda h, w: seen.append(len(h)) or float32_product(h, w))
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 16, requires_grad=True), torch.randn(30, 16, requires_grad=True)
    taught = [
        Taught(torch.tensor(places), torch.randn(len(places), width) / width**0.5, torch.randn(33, width), beta, k)
        for places, width in (([0, 2, 3, 6], 24), ([1, 4], 8))
    ]
    targets, weights = torch.arange(7), torch.linspace(-1, 1, 7)
    found, chosen = teacher_divergence(hidden, weight, targets, TEMPERATURE, taught)
    assert not chosen.requires_grad
    gradients = torch.autograd.grad((weights * found).sum(), (hidden, weight))
    assert max(seen) == min(chunk, 4)

    exact = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    p = (exact[0] @ exact[1].T / TEMPERATURE).softmax(-1)
    expected = [p.sum() * 0] * 7
    for each in taught:
        q = (each.hidden.double() @ each.weight[:30].double().T / TEMPERATURE).softmax(-1)
        assert torch.allclose(chosen[each.places].double(), q.log()[range(len(q)), each.places], rtol=1e-5)
        for place, of_token in zip(each.places.tolist(), q, strict=True):
            expected[place] = _plain(p[place], of_token, beta, k)
    assert chosen[5] == 0
    expected = torch.stack(expected)
    assert torch.allclose(found.double(), expected, rtol=2e-5, atol=1e-6)
    for ours, theirs in zip(gradients, torch.autograd.grad((weights * expected).sum(), exact), strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm() + 1e-6


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
