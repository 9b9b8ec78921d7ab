"""Tokens per forward pass: those that a start begins with, and fewer when memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor

from grpo_core.config.run import RunConfig
from grpo_core.distributed import max_over_processes
from grpo_core.errors import TrainingError
from grpo_core.model.policy import Policy
from grpo_core.model.sequences import Sequences, pack
from grpo_core.planning.hardware import Gpu
from grpo_core.planning.memory import PlannedRun, peak_memory
from grpo_core.planning.plan import Plan
from grpo_core.planning.shapes import ForecastError, PromptLengths, load_shape, load_teachers
from grpo_core.planning.tokens_per_pass import choose_tokens
from grpo_core.system.memory import GIB, gib_text

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

    planned: int  # see `first_limit`
    policy: Policy
    longest: int = 0  # tokens that a sequence of this training may have
    shows: bool = False  # in its updates a teacher reads longer ones, by teacher.template
    tokens: int = field(init=False)  # that fit, as far as is known

    def __post_init__(self) -> None:
        self.tokens = self.planned

    @property
    def reduced(self) -> int | None:
        """Tokens per pass after memory has run out; None if it has not."""
        return self.tokens if self.tokens < self.planned else None

    @property
    def limit(self) -> int:
        """Tokens of a pass on the device: on a CPU, more would not make it faster."""
        return min(self.tokens, CPU_TOKENS) if next(self.policy.parameters()).device.type == "cpu" else self.tokens

    def run(self, sequences: Sequences, work: Callable[[list[Tensor]], Result], *, share_prompts: bool) -> Result:
        """Return `work(parts)` for the sequences' rows, packed into one part per pass.

        Tried again as long as memory runs out, from the beginning each time: with half the tokens per pass, until none
        has more than the longest sequence; then recomputing the activations of half of the layers, then of all. Raises
        TrainingError if that does not help either. With a sharded model nothing is tried again: it raises
        SharedModelError, or TrainingError at one completion.
        """
        longest = int(sequences.lengths.max())
        while True:
            parts = [*pack(sequences, self.limit, share_prompts=share_prompts)]
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
                    reads_more = self.shows or 0 < self.longest < longest
                    more = "; if the teacher's pass ran out, show less in teacher.template" if reads_more else ""
                    raise TrainingError(
                        f"memory runs out with a single completion ({longest} tokens with its prompt) in a forward "
                        "pass; shorten max_completion_length, set train.gradient_checkpointing or model.use_peft, or "
                        f"take a smaller model{more} ({error})"
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


def first_limit(config: RunConfig, plan: Plan, longest_prompt: int, accelerator: Accelerator, shown: int = 0) -> int:
    """Return the plan's tokens per pass, or those of b sequences of the greatest length if it has chosen none; fewer,
    and say so, if they cannot fit a GPU of this training, which may not be one that the plan was made for. Called by
    every process, and the same on each. `shown`: see `PromptLengths`.

    What the plan only left no margin for is kept: results follow from the number by rounding.
    """
    planned = plan.max_tokens_per_pass
    most = planned or plan.per_device_train_batch_size * (longest_prompt + config.rollout.max_completion_length)
    tokens = most
    if accelerator.device.type == "cuda":
        properties = torch.cuda.get_device_properties(accelerator.device)
        gpu = Gpu(properties.name, properties.total_memory / GIB)
        tokens = -max_over_processes(
            -_fitting(config, plan, most, PromptLengths(longest_prompt, longest_prompt, "", shown), gpu)
        )
        if tokens < most and accelerator.is_main_process:
            print(
                f"training: {most} tokens per pass, {'of the plan' if planned else 'which the plan did not limit'}, do "
                f"not fit a {gpu.name} of {gib_text(properties.total_memory / GIB)}: going on with {tokens}, with the "
                "same results up to rounding",
                flush=True,
            )
    return tokens


def _fitting(config: RunConfig, plan: Plan, most: int, lengths: PromptLengths, gpu: Gpu) -> int:
    """Return these tokens per pass, or the number that is chosen for this GPU if they are more than it holds; with its
    margin, if the plan has chosen none."""
    try:
        shape = load_shape(config.model.name_or_path, config.model.revision)
        run = PlannedRun(config, plan, shape, lengths, gpu, load_teachers(config))
        if plan.max_tokens_per_pass and "warning" not in peak_memory(run):
            return most
        chosen = choose_tokens(run)
    except ForecastError:  # its memory is not known
        return most
    assert chosen is not None
    return min(chosen, most)
