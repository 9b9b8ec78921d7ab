"""How many completions one forward pass holds, found by running out of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from grpo_core.errors import TrainingError
from grpo_core.model.policy import Policy

Result = TypeVar("Result")


@dataclass
class Memory:
    """How many completions one forward pass holds. Where that is one already, the policy keeps less of it."""

    rows: int
    policy: Policy

    def run(self, work: Callable[[int], Result]) -> Result:
        """`work(rows)`, again for as long as memory runs out: with half the rows, and where one is left, keeping the
        activations of half of the layers, then of none. `work` starts afresh each time."""
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
