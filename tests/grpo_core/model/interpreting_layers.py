"""`python -m tests.grpo_core.model.interpreting_layers`: a GPU's layers on this CPU, by Triton's interpreter.

Prints, as JSON, by family: how far log-probabilities, gradients and sampled logits are from those of torch's own
operations; how many operations a layer has in an update and in a token step, without kernels and with them: torch's,
without views and allocation, and Triton's; and what is said of parts that stay plain. Varlen attention counts as one
operation each way, as it is on a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import tests.interpreter  # noqa: F401, I001  before Triton

import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import interpreter

from grpo_core.model import capabilities, fused_logprobs, logprobs, packed_attention
from grpo_core.model.fused import attention, kernels
from grpo_core.model.policy import Policy
from grpo_core.model.sequences import Sequences
from grpo_core.rollout.group_cache import GroupCache
from tests.plain_kernels import plain_varlen

SIZES: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 6, "num_key_value_heads": 2}
SIZES |= {"vocab_size": 104, "max_position_embeddings": 512, "head_dim": 12, "initializer_range": 0.2}
GEMMA = {"sliding_window": 512, "query_pre_attn_scalar": 12}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {}),
    "Qwen2": ("Qwen2", {"head_dim": 8}),
    "Qwen3": ("Qwen3", {}),
    "Gemma3": ("Gemma3Text", GEMMA),
    "Phi3": ("Phi3", {"head_dim": 8, "pad_token_id": 0}),
}
FREE = ("empty", "detach", "alias", "_unsafe_view")


class Operations(TorchDispatchMode):
    """Counts what a GPU would be given to do."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view and not any(word in str(function) for word in FREE):
            self.count += 1
        return function(*args, **(kwargs or {}))

    def once(self, work: Any, *arguments: Any, **options: Any) -> Any:
        """Do work that is one operation on a GPU."""
        self.count += 1
        with _disable_current_modes():
            return work(*arguments, **options)


@contextmanager
def counting() -> Iterator[Operations]:
    launch = interpreter.GridExecutor.__call__

    class Varlen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Tensor:
            ctx.given = given
            return counted.once(_varlen, *given)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            def of_inputs() -> Any:
                with torch.enable_grad():
                    inputs = [x.detach().requires_grad_() for x in ctx.given[:3]]
                    return torch.autograd.grad(_varlen(*inputs, *ctx.given[3:]), inputs, *gradients)

            return *counted.once(of_inputs), *[None] * (len(ctx.given) - 3)

    def varlen(*given: Any, scale: float, **_: Any) -> Any:
        return Varlen.apply(*given, scale)

    with (
        mock.patch.object(
            interpreter.GridExecutor, "__call__", lambda self, *args, **keys: counted.once(launch, self, *args, **keys)
        ),
        mock.patch.object(packed_attention, "varlen_attn", varlen),
        Operations() as counted,
    ):
        yield counted


def _varlen(*given: Any) -> Tensor:
    return plain_varlen(*given[:-1], scale=given[-1], window_size=(-1, 0), enable_gqa=True)


def made(family: str, layers: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    name, changes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**SIZES | changes, num_hidden_layers=layers)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # norms too
        parameter.data += 0.1 * torch.randn_like(parameter)
    logprobs.make_logits_float32(model)
    return model.to(dtype)


def updated(
    family: str, layers: int, dtype: torch.dtype, kinds: tuple[str, ...]
) -> tuple[list[Tensor], list[int], Any]:
    """Log-probabilities and gradients of a second pass, whose gradients are added to those of the first; operations
    forward and backward; notes."""
    with mock.patch.object(logprobs, "FUSED", kinds):
        policy = Policy(made(family, layers, dtype), 1.0, max_length=100)
        policy.attention = "varlen"
        lengths = torch.tensor([[5, 8], [5, 9], [6, 1], [6, 10]])
        sequences = Sequences(torch.randint(104, (4, 20)), *lengths.T, torch.tensor([0, 0, 1, 1]))
        sequences.input_ids[1::2, :6] = sequences.input_ids[::2, :6]
        inputs, found = policy.prepare(sequences), list[int]()
        for _ in range(2):
            with counting() as counted:
                logp, _ = policy(inputs)
            found.append(counted.count)
            with counting() as counted:
                logp.backward(logp.detach().cos())
            found.append(counted.count)
        gradient = torch.cat([p.grad.float().flatten() for p in policy.model.parameters() if p.grad is not None])
        return [logp.detach(), gradient], found[2:], policy.notes


@torch.no_grad()
def decoded(family: str, layers: int, dtype: torch.dtype, kinds: tuple[str, ...], steps: int = 7) -> tuple[float, int]:
    """Decode some steps, in the middle of which a prompt joins and a row leaves. Returns the largest distance from
    plain passes' logits, and the operations of a step."""
    model, worst = made(family, layers, dtype), 0.0
    with mock.patch.object(logprobs, "FUSED", ()):
        expected = made(family, layers, dtype)
    with mock.patch.object(logprobs, "FUSED", kinds):
        Policy(model, 1.0, max_length=100)
        prompts, captures = [[3, 4, 5], [6, 7], [8] * 9], bool(kinds)
        cache = GroupCache(model, prompts[:2], [2, 1], 12, captures=captures)
        rows, logits = [[*prompts[n]] for n in (0, 0, 1)], cache.prefill()
        for step in range(steps):
            if step == 3:
                new = GroupCache(model, prompts[2:], [1], 12, captures=captures)
                logits = torch.cat([logits, new.prefill()])
                cache.join(new)
                rows.append([*prompts[2]])
            if step == 5:
                going = torch.tensor([False, True, True, True])
                cache.keep(going)
                logits, rows = logits[going], [row for row, goes in zip(rows, going, strict=True) if goes]
            plain = torch.stack([expected(torch.tensor([row])).logits[0, -1].float() for row in rows])
            worst = max(worst, float((logits - plain).abs().max() / plain.abs().max()))
            token = torch.multinomial(logits.softmax(-1), 1)[:, 0]
            for row, one in zip(rows, token.tolist(), strict=True):
                row.append(one)
            with counting() as counted:
                logits = cache.decode(token)
    return worst, counted.count


def report(family: str) -> dict[str, Any]:
    def distance(a: Tensor, b: Tensor) -> float:
        return float((a - b).norm() / b.norm())

    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        plain, ours = (updated(family, 2, dtype, kinds) for kinds in ((), ("cpu",)))
        sampled, steps = decoded(family, 2, dtype, ("cpu",))
        found[f"{dtype}"] = [*(distance(a, b) for a, b in zip(ours[0], plain[0], strict=True)), sampled]
        found["notes"] = ours[2]
    before = [sum(updated(family, layers, torch.bfloat16, ())[1]) for layers in (1, 2)]
    found["update"] = [before[1] - before[0], sum(ours[1]) - sum(updated(family, 1, torch.bfloat16, ("cpu",))[1])]
    before = [decoded(family, layers, torch.bfloat16, (), 2)[1] for layers in (1, 2)]
    found["token step"] = [before[1] - before[0], steps - decoded(family, 1, torch.bfloat16, ("cpu",), 2)[1]]
    return found


def main() -> None:
    def replay(cache: Any, token: Tensor) -> Tensor:
        return cache._forward(token[:, None], cache.positions[:, None])

    with (
        mock.patch.multiple(capabilities, PROBED=9),
        mock.patch.multiple(kernels, TILE=1024, PROGRAMS=3),
        mock.patch.multiple(attention, KEYS=16),
        mock.patch.object(fused_logprobs, "BLOCK", 128),
        # torch adds a bfloat16 product to float32 sums on a GPU only.
        mock.patch.object(fused_logprobs, "_add_product", lambda total, a, b: total.add_(a @ b)),
        mock.patch.object(GroupCache, "_replay", replay),
    ):
        json.dump({family: report(family) for family in sys.argv[1:] or FAMILIES}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
