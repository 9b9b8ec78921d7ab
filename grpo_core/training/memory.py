"""Completions per forward pass, found by running out of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from grpo_core.errors import TrainingError
from grpo_core.model.policy import Policy

CPU_TOKENS = 2048  # per pass on a CPU; with more, what a layer computes leaves the cache before the next layer reads it

Result = TypeVar("Result")


@dataclass
class OutOfMemoryRetry:
    """Completions per forward pass: halved when memory runs out; at one completion, activations are recomputed."""

    rows: int
    policy: Policy

    def run(self, work: Callable[[int], Result]) -> Result:
        """`work(rows)`, tried again as long as memory runs out: with half the rows; with one row, recomputing the
        activations of half of the layers, then of all. `work` starts from the beginning each time."""
        while True:
            try:
                return work(self.rows)
            except torch.OutOfMemoryError as error:
                keeps = torch.is_grad_enabled() and self.policy.recomputed < len(self.policy.recomputable)
                if self.rows == 1 and not keeps:
                    raise TrainingError(
                        "memory runs out with a single completion in a forward pass; shorten max_completion_length, "
                        f"set model.use_peft, or take a smaller model ({error})"
                    ) from error
            # After the exception is gone: it holds the activations of the attempt that failed.
            if self.rows > 1:
                self.rows = (self.rows + 1) // 2
            else:
                layers = len(self.policy.recomputable)
                self.policy.recompute(min(self.policy.recomputed + (layers + 1) // 2, layers))
            torch.cuda.empty_cache()
            recomputed = f", {self.policy.recomputed} layers computed again" if self.policy.recomputed else ""
            print(f"out of memory: going on with {self.rows} completions in a forward pass{recomputed}", flush=True)


def tokens_per_pass(budget: int, device: torch.device) -> int:
    """Token budget of one forward pass on this device."""
    return min(budget, CPU_TOKENS) if device.type == "cpu" else budget
