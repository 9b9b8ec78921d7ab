"""References for the parts of `benchmarks.gpu_check`: transformers and torch alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.report import DEVICE
from benchmarks.workload import Workload
from grpo_core.model.sequences import Sequences, pad


def draw_sequences(workload: Workload) -> Sequences:
    """Draw groups of random prompts and completions of different lengths."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high + 1, (), generator=generator))
        return torch.randint(2, workload.vocabulary, (length,), generator=generator).tolist()

    prompts = [draw(*workload.prompt_lengths) for _ in range(workload.prompts)]
    rows = [
        (number, prompt, draw(1, workload.completion))
        for number, prompt in enumerate(prompts)
        for _ in range(workload.group)
    ]
    return Sequences(
        pad([prompt + completion for _, prompt, completion in rows], torch.int64),
        torch.tensor([len(prompt) for _, prompt, _ in rows]),
        torch.tensor([len(completion) for _, _, completion in rows]),
        torch.tensor([number for number, _, _ in rows]),
    )


def plain(model: Any, sequences: Sequences, temperature: float) -> tuple[list[Tensor], list[Tensor]]:
    """Compute log-probabilities and gradient by transformers alone: padded rows, all logits. ([(B, T)], one per
    parameter)"""
    ids = sequences.input_ids.to(DEVICE)
    logits = model(input_ids=ids[:, :-1]).logits.float() / temperature
    chosen = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    places = torch.arange(int(sequences.completion_lengths.max()))
    columns = (sequences.prompt_lengths[:, None] - 1 + places).clamp(max=chosen.shape[1] - 1)
    inside = (places < sequences.completion_lengths[:, None]).to(DEVICE)
    logprobs = chosen.gather(1, columns.to(DEVICE)) * inside
    return [logprobs.detach()], gradient(model, logprobs)


def gradient(model: Any, logprobs: Tensor) -> list[Tensor]:
    """Gradient of a weighted sum of the log-probabilities; empty for a frozen model."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        return []
    model.zero_grad()
    (logprobs * torch.linspace(-1, 1, len(logprobs), device=DEVICE)[:, None]).sum().backward()
    return [parameter.grad.detach().clone() for parameter in trained]


def plain_head(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> list[Tensor]:
    """Log-probabilities, entropies and both gradients in float32, a few tokens at a time."""
    states, matrix = hidden.float().requires_grad_(), weight.float().requires_grad_()
    found = []
    for part in range(0, len(targets), 512):
        log_p = (states[part : part + 512] @ matrix.T / temperature).log_softmax(-1)
        chosen = log_p.gather(1, targets[part : part + 512, None]).squeeze(1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        (chosen.sum() + entropy.sum()).backward()
        found.append((chosen.detach(), entropy.detach()))
    assert states.grad is not None and matrix.grad is not None
    return [*(torch.cat(parts) for parts in zip(*found, strict=True)), states.grad, matrix.grad]
