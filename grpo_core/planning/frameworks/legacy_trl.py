"""The plan of TRL 0.17 and 0.16 with transformers of their time (up to 4.51): every update samples its own rollout.

The symbols are those of `rules`. The sampler's length counts the prompts that an epoch then drops, so a run may end
before the `max_steps` that its learning rate schedule is made for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_core.planning.rules import PlanInputs, Rules


@dataclass(frozen=True)
class Trl017Inputs(PlanInputs):
    """G has to divide b·W·A; a rollout feeds mu updates."""

    rules: Rules = "trl-0.17"

    @property
    def batch_factors(self) -> str:
        b, w, a = self.per_device_train_batch_size, self.num_processes, self.gradient_accumulation_steps
        return f"per_device_train_batch_size·num_processes·gradient_accumulation_steps={b}·{w}·{a}"

    @property
    def updates_per_epoch(self) -> int:
        a = self.gradient_accumulation_steps
        return self._length_in_updates(repeats=a, batch=self.per_device_train_batch_size * a)

    def _length_in_updates(self, repeats: int, batch: int) -> int:
        """floor(L/A), L being the batches of a sampler that counts the dropped prompts too."""
        rows = self.num_prompts * self.num_generations * self.num_iterations * repeats
        return max(math.ceil(math.ceil(rows / batch) / self.num_processes) // self.gradient_accumulation_steps, 1)

    @property
    def updates_done(self) -> int:
        """Updates after which the run ends: mu per full chunk of prompts, for the epochs in `total_updates`."""
        planned = math.ceil(self.total_updates / self.updates_per_epoch)
        epochs = planned if self.max_steps else math.ceil(self.num_train_epochs)
        chunks = self.num_prompts // (self.prompt_batch // self.num_generations)
        return min(self.total_updates, epochs * chunks * self.num_iterations)

    @property
    def rollouts(self) -> int:
        return math.ceil(self.updates_done / self.num_iterations)


@dataclass(frozen=True)
class Trl016Inputs(Trl017Inputs):
    """G has to divide b·W; each of the A micro-steps of every mu-th update has a rollout of its own."""

    rules: Rules = "trl-0.16"

    @property
    def batch_factors(self) -> str:
        return f"per_device_train_batch_size·num_processes={self.per_device_train_batch_size}·{self.num_processes}"

    @property
    def generation_batch(self) -> int:
        return self.per_device_train_batch_size * self.num_processes

    @property
    def prompt_batch(self) -> int:
        return self.generation_batch * self.gradient_accumulation_steps

    @property
    def updates_per_epoch(self) -> int:
        return self._length_in_updates(repeats=1, batch=self.per_device_train_batch_size)

    @property
    def rollouts(self) -> int:
        return math.ceil(self.updates_done / self.num_iterations) * self.gradient_accumulation_steps


LEGACY: dict[Rules, type[PlanInputs]] = {"trl-0.17": Trl017Inputs, "trl-0.16": Trl016Inputs}
