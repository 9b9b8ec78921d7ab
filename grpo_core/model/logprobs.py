"""Hidden states → log-probabilities of chosen tokens, without the logits of all tokens at once.

The output layer is applied to chunks of tokens, so that memory does not grow with tokens · vocabulary. This is the
implementation for CPUs; that for GPUs is in `fused_logprobs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor, nn

from grpo_core.config.memory_bounds import KEPT_LOGITS, chunk_tokens

Floor = Callable[[Tensor], Tensor]  # (N, V) logits at the sampling temperature → (N,) lowest that can be sampled
Figure = Callable[[Tensor, Tensor], Tensor]  # (N, V) logits at the sampling temperature, (N,) targets → (N,)
FUSED = ("cuda",)  # types of devices that `fused_logprobs` is for
FLOOR_PARTS = 32  # of a chunk
LEAST = torch.finfo(torch.float32).min  # for log p where p = 0: its term is 0
CAST = 2**20  # elements of a weight that a CPU converts together, so that they are still near when they are multiplied


def chosen_logprobs(
    hidden: Float[Tensor, "N h"],
    weight: Float[Tensor, "V h"],
    targets: Int[Tensor, " N"],
    temperature: float,
    floor: Floor | None = None,
) -> tuple[Float32[Tensor, " N"], Float32[Tensor, " N"]]:
    """Return logp = z_t − log Σ_j exp z_j and the entropy H = −Σ_j p_j log p_j of z = h Wᵀ / temperature.

    z is float32, also of states and weights in bfloat16; the products of the gradients have their dtype. With a floor,
    j runs over the tokens that can be sampled, and t.
    """
    if hidden.device.type in FUSED:
        from grpo_core.model.fused_logprobs import FusedLogprobs

        return FusedLogprobs.apply(hidden, weight, targets, temperature, floor)
    return _ChosenLogprobs.apply(hidden, weight, targets, temperature, floor)


def lowest_logits(
    logits: Float32[Tensor, "N V"], temperature: float, floor: Floor | None
) -> Float32[Tensor, " N"] | None:
    """Lowest logit, before the temperature, of a token that can be sampled; None without a floor. By few tokens at a
    time: a floor sorts probabilities, which takes several times the memory of the logits."""
    if floor is None:
        return None
    found = []
    for part in logits.split(-(-len(logits) // FLOOR_PARTS)):
        scaled = part / temperature
        found.append(torch.where(scaled >= floor(scaled)[:, None], part, torch.inf).amin(-1))
    return torch.cat(found)


def leave_out(
    logits: Float32[Tensor, "N V"], targets: Int[Tensor, " N"], lowest: Float32[Tensor, " N"] | None
) -> Float32[Tensor, "N V"]:
    """Set the logits below the lowest to −inf, in place, but not the targets': rounding, or an update since they were
    sampled, may have moved them below."""
    if lowest is not None:
        size = -(-len(logits) // FLOOR_PARTS)
        for part in (slice(start, start + size) for start in range(0, len(logits), size)):
            drop = (logits[part] < lowest[part, None]).scatter_(1, targets[part, None], False)
            logits[part].masked_fill_(drop, -torch.inf)
    return logits


@torch.no_grad()
def over_logits(
    hidden: Float[Tensor, "N h"],
    weight: Float[Tensor, "V h"],
    targets: Int[Tensor, " N"],
    temperature: float,
    figure: Figure,
) -> Float32[Tensor, " N"]:
    """Return the figure of each token's logits h Wᵀ / temperature and its target."""
    parts = _chunks(len(hidden), len(weight))
    return torch.cat([figure(float32_product(hidden[part], weight).div_(temperature), targets[part]) for part in parts])


@torch.no_grad()
def divergence(
    hidden: Float[Tensor, "N h"],
    weight: Float[Tensor, "V h"],
    other_hidden: Float[Tensor, "N other_h"],
    other_weight: Float[Tensor, "V other_h"],
) -> Float32[Tensor, " N"]:
    """KL(p ‖ q) = Σ_j p_j (log p_j − log q_j), where p = softmax(h Wᵀ), and q is that of the other."""
    kl = torch.empty(len(hidden), device=hidden.device)
    for part in _chunks(len(hidden), len(weight)):
        log_p = float32_product(hidden[part], weight).log_softmax(-1)
        kl[part] = kl_of_logs(log_p, float32_product(other_hidden[part], other_weight).log_softmax(-1))
    return kl


@dataclass(frozen=True)
class Taught:
    """What the policy's distributions of n tokens are compared with: a frozen teacher's, and how."""

    places: Int[Tensor, " n"]  # of the tokens among the policy's
    hidden: Float[Tensor, "n other_h"]
    weight: Float[Tensor, "W other_h"]  # W ≥ V: rows beyond the policy's are left out
    beta: float  # see `generalised_jsd`
    top_k: int  # 0: the whole vocabulary


def teacher_divergence(
    hidden: Float[Tensor, "N h"],
    weight: Float[Tensor, "V h"],
    targets: Int[Tensor, " N"],
    temperature: float,
    taught: Sequence[Taught],
) -> tuple[Float32[Tensor, " N"], Float32[Tensor, " N"]]:
    """Return the divergence of the policy's distribution softmax(h Wᵀ / temperature) from its teacher's, which alone
    has a gradient, and the teacher's log-probability of each target; 0 for tokens that no teacher reads. No more than a
    chunk's logits exist at a time."""
    return _TeacherDivergence.apply(hidden, weight, targets, temperature, taught)


def generalised_jsd(log_p: Float[Tensor, "N V"], log_q: Float[Tensor, "N V"], beta: float) -> Float[Tensor, " N"]:
    """β·KL(q ‖ m) + (1 − β)·KL(p ‖ m) with m = β·q + (1 − β)·p, where q is the teacher's distribution (GKD,
    arXiv:2306.13649). As in TRL, β = 0 is the forward KL(q ‖ p), and β = 1 the reverse KL(p ‖ q); the general form is 0
    at both."""
    if beta == 0:
        return kl_of_logs(log_q, log_p)
    if beta == 1:
        return kl_of_logs(log_p, log_q)
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    return beta * kl_of_logs(log_q, log_m) + (1 - beta) * kl_of_logs(log_p, log_m)


def outcomes(logits: Float[Tensor, "N V"], top: Int[Tensor, "N k"] | None) -> Float[Tensor, "N outcomes"]:
    """Log-probabilities of the tokens `top`, and in the end of all others as one outcome; None: of each token."""
    log_p = logits.log_softmax(-1)
    if top is None:
        return log_p
    others = log_p.scatter(1, top, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(1, top), others], 1)


def kl_of_logs(log_p: Float[Tensor, "N V"], log_q: Float[Tensor, "N V"]) -> Float[Tensor, " N"]:
    """Σ_j p_j (log p_j − log q_j); a term with p_j = 0 is 0."""
    p = log_p.exp()
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)


class _ChosenLogprobs(torch.autograd.Function):
    """Backward: ∂logp/∂z_j = [j = t] − p_j and ∂H/∂z_j = −p_j (log p_j + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "N h"],
        weight: Float[Tensor, "V h"],
        targets: Int[Tensor, " N"],
        temperature: float,
        floor: Floor | None,
    ) -> tuple[Float32[Tensor, " N"], Float32[Tensor, " N"]]:
        ctx.set_materialize_grads(False)
        keep = any(ctx.needs_input_grad) and len(targets) * len(weight) <= KEPT_LOGITS
        logprobs, entropy = (torch.empty(len(targets), device=hidden.device) for _ in range(2))
        kept, lowest = list[Tensor](), list[Tensor | None]()
        for part in _chunks(len(targets), len(weight)):
            logits = float32_product(hidden[part], weight)
            lowest.append(lowest_logits(logits, temperature, floor))
            log_p = leave_out(logits, targets[part], lowest[-1]).div_(temperature).log_softmax(-1)
            logprobs[part] = log_p.gather(1, targets[part, None]).squeeze(1)
            p = log_p.exp()
            entropy[part] = -torch.linalg.vecdot(p, log_p if floor is None else log_p.clamp_(min=LEAST))
            if keep:
                kept.append(p)
        ctx.save_for_backward(hidden, weight, targets, entropy, *kept)
        ctx.temperature, ctx.lowest = temperature, lowest
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Float32[Tensor, " N"] | None, grad_entropy: Float32[Tensor, " N"] | None
    ) -> tuple[Float[Tensor, "N h"], Float[Tensor, "V h"] | None, None, None, None]:
        hidden, weight, targets, entropy, *kept = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)  # the sum over the chunks
        for n, part in enumerate(_chunks(len(targets), len(weight))):
            if kept:
                p = kept[n]
            else:
                logits = leave_out(float32_product(hidden[part], weight), targets[part], ctx.lowest[n])
                p = logits.div_(ctx.temperature).log_softmax(-1).exp()
            grad = torch.zeros_like(p)
            if grad_entropy is not None:
                log_p = p.log().clamp(min=LEAST)
                grad -= grad_entropy[part, None] * p * (log_p + entropy[part, None])
            if grad_logprobs is not None:
                grad -= grad_logprobs[part, None] * p
                grad.scatter_add_(1, targets[part, None], grad_logprobs[part, None])
            grad = (grad / ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


class _TeacherDivergence(torch.autograd.Function):
    """Backward: each chunk's logits are computed again, and autograd goes through what is made of them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "N h"],
        weight: Float[Tensor, "V h"],
        targets: Int[Tensor, " N"],
        temperature: float,
        taught: Sequence[Taught],
    ) -> tuple[Float32[Tensor, " N"], Float32[Tensor, " N"]]:
        found, chosen = (torch.zeros(len(targets), device=hidden.device) for _ in range(2))
        for of_teacher, part, places in _taught_chunks(taught, len(weight)):
            top, log_q, whole = _taught_outcomes(of_teacher, part, len(weight), temperature)
            log_p = outcomes(float32_product(hidden[places], weight).div_(temperature), top)
            found[places] = generalised_jsd(log_p, log_q, of_teacher.beta)
            chosen[places] = whole.gather(1, targets[places, None]).squeeze(1)
        ctx.save_for_backward(hidden, weight)
        ctx.temperature, ctx.taught = temperature, taught
        ctx.mark_non_differentiable(chosen)
        return found, chosen

    @staticmethod
    def backward(
        ctx: Any, grad: Float32[Tensor, " N"], _: Tensor
    ) -> tuple[Float[Tensor, "N h"], Float[Tensor, "V h"] | None, None, None, None]:
        hidden, weight = ctx.saved_tensors
        grad_hidden, grad_weight = torch.zeros_like(hidden), None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)  # the sum over the chunks
        for of_teacher, part, places in _taught_chunks(ctx.taught, len(weight)):
            top, log_q, _ = _taught_outcomes(of_teacher, part, len(weight), ctx.temperature)
            logits = float32_product(hidden[places], weight).requires_grad_()
            with torch.enable_grad():
                found = generalised_jsd(outcomes(logits / ctx.temperature, top), log_q, of_teacher.beta)
            (of_logits,) = torch.autograd.grad(found, logits, grad[places])
            of_logits = of_logits.to(hidden.dtype)
            grad_hidden[places] = of_logits @ weight
            if grad_weight is not None:
                grad_weight += of_logits.T @ hidden[places]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _taught_chunks(taught: Sequence[Taught], vocabulary: int) -> Iterator[tuple[Taught, slice, Tensor]]:
    """Yield chunks of each teacher's tokens: the teacher's, their part of its tokens, and places of the policy's."""
    for of_teacher in taught:
        for part in _chunks(len(of_teacher.places), vocabulary):
            yield of_teacher, part, of_teacher.places[part]


def _taught_outcomes(
    taught: Taught, part: slice, vocabulary: int, temperature: float
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the teacher's tokens of highest probability, if it is compared on them alone; its log-probabilities of the
    outcomes; and those of the whole vocabulary."""
    logits = float32_product(taught.hidden[part], taught.weight[:vocabulary]).div_(temperature)
    whole = logits.log_softmax(-1)
    top = logits.topk(taught.top_k).indices if taught.top_k else None
    return top, whole if top is None else outcomes(logits, top), whole


def _chunks(tokens: int, vocabulary: int) -> Iterator[slice]:
    size = chunk_tokens("cpu", vocabulary)  # also for `divergence` on a GPU, which holds several arrays of logits
    return (slice(start, start + size) for start in range(0, tokens, size))


def float32_product(hidden: Float[Tensor, "N h"], weight: Float[Tensor, "V h"]) -> Float32[Tensor, "N V"]:
    """h Wᵀ of numbers of one dtype, with float32 results: a logit of 20 in bfloat16 is off by up to 0.06, and so is the
    log-probability that is computed from it. The products of bfloat16 numbers are summed in float32 anyway.

    On a CPU, whose product of bfloat16 gives bfloat16 only, parts of the weight are converted: that takes about twice
    as long with AVX512-BF16.
    """
    if hidden.dtype == weight.dtype == torch.float32:
        return hidden @ weight.T
    if hidden.device.type != "cpu":
        return torch.mm(hidden, weight.T, out_dtype=torch.float32)
    logits = torch.empty(len(hidden), len(weight))
    hidden, rows = hidden.float(), max(1, CAST // weight.shape[1])
    for start in range(0, len(weight), rows):
        part = weight[start : start + rows]
        torch.mm(hidden, part.float().T, out=logits[:, start : start + rows])
    return logits


class Float32Logits(nn.Linear):
    """An output layer whose results are float32 whatever its dtype."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype == self.weight.dtype == torch.float32:
            return super().forward(input)
        logits: Any = _Product.apply(input.flatten(0, -2), self.weight)
        logits = logits.view(*input.shape[:-1], -1)
        return logits if self.bias is None else logits + self.bias.float()


class _Product(torch.autograd.Function):
    """`float32_product` with gradients, whose products have the dtype of the states and weights."""

    @staticmethod
    def forward(ctx: Any, hidden: Float[Tensor, "N h"], weight: Float[Tensor, "V h"]) -> Float32[Tensor, "N V"]:
        ctx.save_for_backward(hidden, weight)
        return float32_product(hidden, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Float32[Tensor, "N V"]) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        gradient = gradient.to(hidden.dtype)
        return (
            gradient @ weight if ctx.needs_input_grad[0] else None,
            gradient.T @ hidden if ctx.needs_input_grad[1] else None,
        )


def make_logits_float32(model: Any) -> None:
    """Let the model's own passes give float32 logits, also those that it scales or caps. A model whose output layer is
    not a linear one is left as it is."""
    layer = model.get_output_embeddings()
    if type(layer) is nn.Linear:
        layer.__class__ = Float32Logits


def gives_float32_logits(model: Any) -> bool:
    """True after `make_logits_float32`, also if the layer is under an adapter by now."""
    layer = model.get_output_embeddings()
    for wrapped in ("original_module", "base_layer"):
        layer = getattr(layer, wrapped, layer)
    return isinstance(layer, Float32Logits)
