"""Kernels and policies beside plain torch: attention of packed batches, the output layer, copies, waits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu.reference import draw_sequences, gradient, plain, plain_head
from benchmarks.gpu.report import (
    DEVICE,
    MISSING,
    ON_GPU,
    PRECISION,
    TINY,
    Report,
    Row,
    at_most,
    device_seconds,
    distance,
    equals,
    small,
)
from benchmarks.side_ours import replayed, run_directory
from benchmarks.workload import write
from grpo_core.config.inputs import ModelConfig
from grpo_core.model import packed_attention
from grpo_core.model.loading import load_model, with_adapter
from grpo_core.model.logprobs import chosen_logprobs
from grpo_core.model.policy import Policy
from grpo_core.system.to_device import move, to_device

PACKED = {"no": "flex", "bf16": "varlen"} if ON_GPU else {"no": "padded", "bf16": "padded"}  # kinds of attention
HEADS = ((14, 2, 64), (12, 2, 128), (28, 4, 128), (16, 16, 64), (8, 8, 80))  # query heads, key heads, size
MOST_WAITS = 4  # of the host for the device per update
EXACT = 1e-4  # relative distance of float32 results that differ only by rounding
HALF = 1.5e-2  # the same of results in bfloat16
ROUNDING = 2.0  # times the distance of plain bfloat16 rows from float32


def attention(scratch: Path, report: Report) -> None:
    """Compare varlen attention of a packed batch, forward and backward, with plain attention in float64."""
    if not ON_GPU:
        report(Row("varlen attention", MISSING))
        return
    prompts, groups = torch.tensor([60, 220, 1]), [[100, 1, 37], [512, 3], [5, 64, 129]]
    completions = torch.tensor([length for group in groups for length in group])
    prompt_of = torch.tensor([number for number, group in enumerate(groups) for _ in group])
    packed = to_device(packed_attention._varlen(prompts, completions, prompt_of), DEVICE)
    for heads, key_heads, size in HEADS:
        torch.manual_seed(0)
        total = int(prompts.sum() + completions.sum())
        inputs = [
            torch.randn(count, total, size, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
            for count in (heads, key_heads, key_heads)
        ]
        weight = torch.randn(total, heads, size, dtype=torch.bfloat16, device=DEVICE)
        output = packed_attention._attend_varlen(inputs[0], inputs[1], inputs[2], packed, size**-0.5)
        (output * weight).float().sum().backward()
        exact = [x.detach().double().requires_grad_() for x in inputs]
        expected = _plain_attention(exact, prompts, completions, prompt_of)
        (expected * weight.double()).sum().backward()
        for name, ours, theirs in zip(
            ("output", "gradient of queries", "of keys", "of values"),
            [output, *(x.grad for x in inputs if x.grad is not None)],
            [expected, *(x.grad for x in exact if x.grad is not None)],
            strict=True,
        ):
            at_most(report, f"varlen, {heads}/{key_heads} heads of {size}: {name}", distance([ours], [theirs]), HALF)


def _plain_attention(inputs: list[Tensor], prompts: Tensor, completions: Tensor, prompt_of: Tensor) -> Tensor:
    """Attention over all pairs of tokens, masked by whose each is. → (N, H, d)"""
    query, key, value = inputs
    owner = torch.cat([torch.arange(len(prompts)).repeat_interleave(prompts), prompt_of.repeat_interleave(completions)])
    member = torch.arange(len(completions)).repeat_interleave(completions)
    member = torch.cat([torch.full((int(prompts.sum()),), -1), member])
    lengths = [(0, int(n)) for n in prompts] + [
        (int(prompts[p]), int(n)) for p, n in zip(prompt_of, completions, strict=True)
    ]
    place = torch.cat([torch.arange(start, start + length) for start, length in lengths])
    seen = (owner[:, None] == owner) & (place[:, None] >= place) & ((member == -1) | (member[:, None] == member))
    key, value = (x.repeat_interleave(len(query) // len(key), 0) for x in (key, value))
    scores = (query @ key.transpose(1, 2)) * query.shape[-1] ** -0.5
    return (scores.masked_fill(~seen.to(query.device), -torch.inf).softmax(-1) @ value).transpose(0, 1)


def head(scratch: Path, report: Report) -> None:
    """Compare the output layer with float32 at real sizes, with logits as wide as a real model's; measure its time and
    memory."""
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    cases = [(8192, 896, 151_936), (5000, 896, 151_936), (300, 1536, 32_003), (1, 64, 8192), (130, 64, 8191)]
    for tokens, width, vocabulary in [(64, 32, 1000), (1, 32, 1001)] if TINY else cases:
        torch.manual_seed(0)
        hidden = torch.randn(tokens, width, device=DEVICE, dtype=dtype, requires_grad=True)
        weight = (4 * torch.randn(vocabulary, width, device=DEVICE, dtype=dtype) / width**0.5).requires_grad_()
        targets = torch.randint(vocabulary, (tokens,), device=DEVICE)

        def work(hidden: Tensor = hidden, weight: Tensor = weight, targets: Tensor = targets) -> list[Any]:
            hidden.grad = weight.grad = None
            logprobs, entropy = chosen_logprobs(hidden, weight, targets, 0.9)
            (logprobs.sum() + entropy.sum()).backward()
            return [logprobs, entropy, hidden.grad, weight.grad]

        found, expected = work(), plain_head(hidden.detach(), weight.detach(), targets, 0.9)
        # Logits are float32; gradients are rounded to bfloat16 for the products that follow.
        for name, bound, ours, plainly in zip(
            ("log-probabilities", "entropies", "gradient of the states", "gradient of the weights"),
            (EXACT, EXACT, *[5e-3 if ON_GPU else EXACT] * 2),
            found,
            expected,
            strict=True,
        ):
            at_most(report, f"head, {tokens} × {vocabulary}: {name}", distance([ours], [plainly]), bound)
    if ON_GPU:
        hidden, weight = torch.randn(8192, 896, device=DEVICE), torch.randn(151_936, 896, device=DEVICE)
        hidden, weight = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        targets = torch.randint(151_936, (8192,), device=DEVICE)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        seconds = device_seconds(lambda: work(hidden, weight, targets))
        rate = 8 * 8192 * 896 * 151_936 / seconds  # two products forward and again, two more of the gradient
        added = (torch.cuda.max_memory_allocated() - before) / 2**20
        figures = f"{1e6 * seconds / 8192:.2f} us per token, {rate / 1e12:.0f} TFLOP/s, {added:.0f} MiB"
        report(Row("head, 8192 × 151936: forward and backward", figures))


def copies(scratch: Path, report: Report) -> None:
    """Check that copies by pinned memory arrive as they were, while the device is busy and buffers are used again."""
    torch.manual_seed(0)
    for _ in range(20):
        tensors = [torch.randint(1000, (n,)) for n in (1, 70_000, 3)] + [torch.rand(1000), torch.rand(9).bfloat16()]
        if ON_GPU:
            torch.cuda._sleep(2_000_000)
        kept = [tensor.clone() for tensor in tensors]
        moved = move(tensors, DEVICE)
        if ON_GPU:  # on a CPU nothing is copied
            for tensor in tensors:
                tensor.zero_()
        if not all(torch.equal(found.cpu(), expected) for found, expected in zip(moved, kept, strict=True)):
            report(Row("copies by pinned memory", "changed on the way", "equal", False))
            return
    report(Row("copies by pinned memory", "equal", "equal", True))


def policies(scratch: Path, report: Report) -> None:
    """Compare log-probabilities and gradients of every kind of policy with plain rows in float32."""
    work = small()
    write(work, scratch / "workload")
    sequences = draw_sequences(work)
    for precision in ("no", "bf16"):
        for kind in ("all weights", "LoRA", "frozen"):
            policy = Policy(_model(scratch, kind), 0.9, bf16=precision == "bf16")
            expected = plain(_model(scratch, kind), sequences, 0.9)
            logprobs, _ = policy(policy.prepare(sequences))
            found = [[logprobs.detach()], gradient(policy.master, logprobs)]
            way = policy.attention if policy.packs else f"not packed: {policy.why_not}"
            equals(report, f"{precision}, {kind}: packed for", way, PACKED[precision])
            half = plain(_model(scratch, kind).bfloat16(), sequences, 0.9) if precision == "bf16" else expected
            for what, ours, plainly, rounded in zip(
                ("log-probabilities", "gradient"), found, expected, half, strict=True
            ):
                if plainly:  # a frozen model has no gradient
                    bound = max(EXACT, ROUNDING * distance(rounded, plainly))
                    at_most(report, f"{precision}, {kind}: {what} from float32", distance(ours, plainly), bound)


def _model(scratch: Path, kind: str) -> Any:
    model = load_model(scratch / "workload" / "model").to(DEVICE)
    if kind == "frozen":
        return model.requires_grad_(False)
    torch.manual_seed(0)
    model = with_adapter(model, ModelConfig(name_or_path="model", use_peft=kind == "LoRA"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)  # it starts at zero
    return model


def waits(scratch: Path, report: Report) -> None:
    """Count how often the host waits for the device per update, as torch reports it."""
    from grpo_core.training import loop

    work = small(mode="replay")
    write(work, scratch / "workload")
    run_directory(work, scratch / "workload", scratch / "run", {"precision": PRECISION})
    counts: list[list[str]] = []
    update = loop.update

    def counted(*arguments: Any) -> Any:
        with waits_of_host() as places:
            found = update(*arguments)
        counts.append(places)
        return found

    with replayed(work, scratch / "workload"), mock.patch.object(loop, "update", counted):
        loop.train(scratch / "run", scratch / "run" / "training")
    if not ON_GPU:
        report(Row("waits per update", MISSING, f"at most {MOST_WAITS}"))
        return
    most = max(counts[1:], key=len)  # the first one compiles
    found = f"{len(most)}: {', '.join(most)}"
    report(Row("waits per update", found, f"at most {MOST_WAITS}", len(most) <= MOST_WAITS))


@contextmanager
def waits_of_host() -> Iterator[list[str]]:
    """Inside, collect the places at which the host waits for the device, as file:line."""
    places: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            if ON_GPU:
                torch.cuda.set_sync_debug_mode("default")
    places += [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
