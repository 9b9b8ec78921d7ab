"""Tokens per forward pass, found by running out of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from grpo_core.errors import TrainingError
from grpo_core.model.policy import Policy
from grpo_core.model.sequences import Sequences, pack

CPU_TOKENS = 2048  # per pass on a CPU; with more, a layer's output leaves the cache before the next layer reads it

Result = TypeVar("Result")


class SharedModelError(TrainingError):
    """Memory has run out with a sharded model: the other processes wait in the middle of a layer, so that all have to
    be started again. `tokens`: per pass, to go on with."""

    def __init__(self, used: int, tokens: int, advice: str, error: torch.OutOfMemoryError):
        super().__init__(
            f"memory runs out with {used} tokens in a forward pass, and processes that share a model cannot go back "
            f"alone. Started again, the training goes on from its last checkpoint with {tokens} tokens in a pass; "
            f"{advice} ({error})"
        )
        self.tokens = tokens


@dataclass
class OutOfMemoryRetry:
    """Tokens per forward pass: halved when memory runs out; at one completion, activations are recomputed."""

    planned: int  # see `pass_limit.first_limit`
    policy: Policy
    longest: int = 0  # tokens that a sequence of this training may have
    tokens: int = field(init=False)  # that fit, as far as is known

    def __post_init__(self) -> None:
        self.tokens = self.planned

    @property
    def reduced(self) -> int | None:
        """Tokens per pass after memory has run out; None if it has not."""
        return self.tokens if self.tokens < self.planned else None

    def run(self, sequences: Sequences, work: Callable[[list[Tensor]], Result], *, share_prompts: bool) -> Result:
        """Return `work(parts)` for the sequences' rows, packed into one part per pass.

        Tried again as long as memory runs out, from the beginning each time: with half the tokens per pass, until none
        has more than the longest sequence; then recomputing the activations of half of the layers, then of all. Raises
        TrainingError if that does not help either. With a sharded model nothing is tried again: it raises
        SharedModelError, or TrainingError at one completion.
        """
        on_cpu = next(self.policy.parameters()).device.type == "cpu"
        longest = int(sequences.lengths.max())
        while True:
            tokens = min(self.tokens, CPU_TOKENS) if on_cpu else self.tokens
            parts = [*pack(sequences, tokens, share_prompts=share_prompts)]
            try:
                return work(parts)
            except torch.OutOfMemoryError as error:
                largest = max(sequences.tokens_of(part, share_prompts=share_prompts) for part in parts)
                keeps = (
                    torch.is_grad_enabled()
                    and not self.policy.is_sharded
                    and self.policy.recomputed < len(self.policy.recomputable)
                )
                if largest <= longest and not keeps:
                    raise TrainingError(
                        f"memory runs out with a single completion ({longest} tokens with its prompt) in a forward "
                        "pass; shorten max_completion_length, set train.gradient_checkpointing or model.use_peft, or "
                        f"take a smaller model ({error})"
                    ) from error
                if self.policy.is_sharded and largest > longest:
                    fewer = max(largest // 2, longest)
                    raise SharedModelError(largest, fewer, self._advice(fewer), error) from error
            # After the exception is gone: it holds the activations of the attempt that failed.
            if largest > longest:
                self.tokens = max(largest // 2, longest)
            else:
                layers = len(self.policy.recomputable)
                self.policy.recompute(min(self.policy.recomputed + (layers + 1) // 2, layers))
            torch.cuda.empty_cache()
            recomputed = f", {self.policy.recomputed} layers computed again" if self.policy.recomputed else ""
            print(
                f"out of memory: going on with {self.tokens} tokens in a forward pass{recomputed}; "
                f"{self._advice(self.tokens)}",
                flush=True,
            )

    def _advice(self, tokens: int) -> str:
        """What would have avoided that memory runs out. A plan refuses fewer tokens than the longest sequence has."""
        if tokens < self.longest:
            return (
                f"a sequence may have {self.longest}, so no train.max_tokens_per_pass saves this memory; "
                "train.gradient_checkpointing, model.use_peft or a shorter rollout.max_completion_length do"
            )
        checkpointing = " and train.gradient_checkpointing = true" if self.policy.recomputed else ""
        return f"with train.max_tokens_per_pass = {tokens}{checkpointing} from the start, this does not happen"
