"""`python -m tests.grpo_core.model.interpreting`: the GPU's output layer on this CPU, by Triton's interpreter.

Prints, as JSON, how far values and gradients are from a plain float64 computation, and which of torch's operations
pass over logits. A process of its own: Triton decides when it is imported whether to interpret.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import json
import sys
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter

from grpo_core.model import fused_logprobs, logprobs
from grpo_core.rollout.sampling import lowest_kept
from grpo_core.rollout.types import Sampling
from tests.grpo_core.rollout.vllm_engine import can_be_drawn

TOKENS, HIDDEN, VOCABULARY = 21, 16, 300  # in three chunks, each row in three blocks
aten = torch.ops.aten
UNSEEN = (
    aten.empty.memory_format,
    aten.new_empty.default,
    aten.set_.source_Storage_storage_offset,
)  # allocation, the interpreter's own


def _with_index(tensor: Any, scope: Any, patch: Any = interpreter._patch_lang_tensor) -> None:
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _with_index  # Triton 3.6 calls int() on an array, which NumPy 2.5 refuses


class Passes(TorchDispatchMode):
    """Notes the operations that read or write at least a chunk's logits, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []
        self.bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch would import its compiler to skip it

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        large = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor) and x.shape[-1:] == (VOCABULARY,)]
        large += [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.shape == (VOCABULARY, 8)]
        if large and not function.is_view and function not in UNSEEN:
            self.noted.append(str(function))
            self.bytes += sum(x.numel() * x.element_size() for x in large)
        return out


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, targets, and gradients of log-probabilities and entropies. One token is nearly certain."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, HIDDEN), torch.randn(VOCABULARY, HIDDEN)
    targets = torch.randint(VOCABULARY, (TOKENS,))
    hidden[0] = 6 * weight[targets[0]]
    return hidden.to(dtype), weight.to(dtype), targets, torch.randn(2, TOKENS)


def computed(function: Any, case: tuple[Tensor, ...], temperature: float, used: list[int], *more: Any) -> list[Tensor]:
    """Log-probabilities, entropies, and the gradients of states and weight of those of them that are used."""
    hidden, weight, targets, gradients = case
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    values = function(hidden, weight, targets, temperature, *more)
    sum((values[n] * gradients[n]).sum() for n in used).backward()  # type: ignore[union-attr]
    return [values[0].detach(), values[1].detach(), hidden.grad, weight.grad]  # type: ignore[list-item]


def plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """Token by token, over those that can be drawn."""
    logprobs, entropies = [], []
    for row, target in zip(hidden @ weight.T / temperature, targets.tolist(), strict=True):
        left = sorted(can_be_drawn(row.log_softmax(-1).tolist(), sampling) | {target})
        log_p = row[left].log_softmax(-1)
        logprobs.append(log_p[left.index(target)])
        entropies.append(-(log_p.exp() * log_p).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def errors(dtype: torch.dtype) -> dict[str, list[float]]:
    """Relative distances from the plain values and gradients, the largest of all cases."""
    found: dict[str, list[float]] = {}
    some = Sampling(1, top_p=0.9), Sampling(1, top_k=7, min_p=0.02), Sampling(1, top_p=0.8, top_k=40, min_p=0.001)
    cases = ((1.0, [0], Sampling(1)), (0.7, [1], Sampling(1)), *((0.7, [0, 1], it) for it in (Sampling(1), *some)))
    for temperature, used, sampling in cases:
        hidden, weight, targets, gradients = case = drawn(dtype)
        exact = hidden.double(), weight.double(), targets, gradients
        expected = computed(plain, exact, temperature, used, sampling)
        floor = partial(lowest_kept, sampling=sampling) if sampling.is_truncated else None
        for name, kinds in {"fused": ("cpu",), "chunked": ()}.items():
            with mock.patch.object(logprobs, "FUSED", kinds):
                ours = computed(logprobs.chosen_logprobs, case, temperature, used, floor)
            distances = [float((a - b).norm() / b.norm()) for a, b in zip(ours, expected, strict=True)]
            found[name] = [max(pair) for pair in zip(found.get(name, distances), distances, strict=True)]
    return found


def infinite() -> bool:
    """Whether tokens that the model excludes, with a logit of −inf, leave all else finite and get no gradient."""
    logits = torch.randn(3, VOCABULARY)
    logits[:, :200] = -torch.inf  # the first block is empty
    targets, gradients = torch.tensor([200, 250, 299]), torch.ones(2, 3)
    values = fused_logprobs._statistics(logits, targets, 1.0)
    expected = torch.distributions.Categorical(logits=logits[:, 200:])
    same = torch.allclose(values[0], expected.log_prob(targets - 200)) and torch.allclose(values[1], expected.entropy())
    fused_logprobs._compute_gradient(logits, logits, targets, 1.0, values, *gradients)
    return same and bool((logits[:, :200] == 0).all()) and bool(logits.isfinite().all())


def passes(kinds: tuple[str, ...]) -> tuple[list[str], float]:
    """torch's operations over logits, forward and backward in bfloat16, and their bytes per logit."""
    hidden, weight, targets, gradients = drawn(torch.bfloat16)
    with mock.patch.object(logprobs, "FUSED", kinds), Passes() as counted:
        computed(logprobs.chosen_logprobs, (hidden[:8], weight, targets[:8], gradients[:, :8]), 1.0, [0])
    return counted.noted, counted.bytes / (8 * VOCABULARY)


def main() -> None:
    fused_logprobs.BLOCK = 128
    chunks = mock.patch.multiple(fused_logprobs, chunk_tokens=lambda *_: 8)
    # torch adds a bfloat16 product to float32 sums on a GPU only.
    product = mock.patch.object(fused_logprobs, "_add_product", lambda total, a, b: total.add_(a @ b))
    kept = mock.patch.multiple(logprobs, KEPT_LOGITS=0, chunk_tokens=lambda *_: 8)
    with chunks, product, kept:
        report = {
            "float32": errors(torch.float32),
            "bfloat16": errors(torch.bfloat16),
            "infinite": infinite(),
            "passes": {name: passes(kinds) for name, kinds in {"fused": ("cpu",), "chunked": ()}.items()},
        }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
