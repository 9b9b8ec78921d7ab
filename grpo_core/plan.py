"""The arithmetic of a run: batches, steps, dropped prompts, warm-up, tokens; an invalid one is refused with fixes.

Symbols: N prompts, G num_generations, b per_device_train_batch_size (completions), W processes, A
gradient_accumulation_steps, S steps_per_generation, P prompts per generation batch, mu num_iterations. The rules are
TRL's (1.16); the trainer performs exactly `Plan.max_steps` updates. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_core.config import RunConfig


class PlanError(ValueError):
    """An invalid combination. `problems`: which value breaks which rule; `fixes`: nearby changes that are valid."""

    def __init__(self, problems: list[str], fixes: list[dict[str, int]]):
        self.problems = problems
        self.fixes = fixes
        lines = [*problems]
        if fixes:
            lines.append("any one of these works: " + "; ".join(_assignment(fix) for fix in fixes))
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class PlanInputs:
    """What a plan follows from; names and defaults are those of the configuration."""

    num_prompts: int
    num_generations: int
    per_device_train_batch_size: int
    max_completion_length: int
    num_processes: int = 1
    gradient_accumulation_steps: int = 1
    steps_per_generation: int | None = None
    generation_batch_size: int | None = None
    num_iterations: int = 1
    num_train_epochs: float = 1.0
    max_steps: int | None = None
    warmup_steps: float = 0
    dynamic_sample: bool = False
    max_resample_times: int = 0
    eval_steps: int | None = None


@dataclass(frozen=True)
class MicroStep:
    """One forward/backward of every process: part `slice` (of S) of generation batch `rollout` (counted from 0)."""

    rollout: int
    slice: int


@dataclass(frozen=True)
class Plan:
    """A valid run in figures; batch sizes count completions, over all processes unless `per_device`."""

    num_prompts: int
    num_generations: int
    per_device_train_batch_size: int
    num_processes: int
    gradient_accumulation_steps: int
    steps_per_generation: int
    num_iterations: int
    generation_batch_size: int  # b·W·S
    effective_batch_size: int  # b·W·A, completions per update
    prompts_per_generation: int  # P
    expanded_dataset_size: int  # N·G
    dropped_prompts_per_epoch: int  # N mod P
    rollouts_per_epoch: int  # floor(N/P)
    micro_steps_per_epoch: int  # floor(N/P)·mu·S
    updates_per_epoch: int
    max_steps: int
    rollouts: int  # generation batches sampled over the whole run
    prompts_seen: int  # P·rollouts; a prompt counts once an epoch
    prompts_dropped: int  # over the epochs that the run completes
    completions: int  # trained on
    max_completions: int  # sampled, if every round of dynamic sampling replaces every group
    max_completion_tokens: int
    evaluations: int  # on the held-out prompts, during training
    warmup_steps: int

    @property
    def micro_steps_per_rollout(self) -> int:
        return self.steps_per_generation * self.num_iterations

    @property
    def on_policy(self) -> bool:
        """Every rollout is used up by the update that follows it, so the sampling policy is the current one."""
        return self.gradient_accumulation_steps % self.micro_steps_per_rollout == 0

    def micro_steps(self, step: int) -> Iterator[MicroStep]:
        """The micro-steps of update `step` (from 0): A of them, fewer in an epoch's last update if A does not divide.

        A pure function of `step`: where a run stands is one number.
        """
        epoch, update = divmod(step, self.updates_per_epoch)
        first = update * self.gradient_accumulation_steps
        last = min(first + self.gradient_accumulation_steps, self.micro_steps_per_epoch)
        for micro_step in range(first, last):
            window, position = divmod(micro_step, self.micro_steps_per_rollout)
            yield MicroStep(epoch * self.rollouts_per_epoch + window, position % self.steps_per_generation)

    def counts(self, updates: int) -> dict[str, int]:
        """What the first `updates` updates take: generation batches, prompts seen and dropped, completions."""
        rollouts = _rollouts(
            updates,
            self.updates_per_epoch,
            self.rollouts_per_epoch,
            self.gradient_accumulation_steps,
            self.micro_steps_per_rollout,
        )
        return {
            "updates": updates,
            "rollouts": rollouts,
            "prompts_seen": rollouts * self.prompts_per_generation,
            "prompts_dropped": rollouts // self.rollouts_per_epoch * self.dropped_prompts_per_epoch,
            "completions": rollouts * self.generation_batch_size,
        }

    def epoch(self, step: int) -> float:
        """Passes over the prompts completed after `step` updates."""
        return step / self.updates_per_epoch


def make_plan(inputs: PlanInputs) -> Plan:
    """Work the plan out; PlanError when a rule is broken."""
    problems = _problems(inputs)
    if problems:
        raise PlanError(problems, list(_fixes(inputs)))
    b, w, a = inputs.per_device_train_batch_size, inputs.num_processes, inputs.gradient_accumulation_steps
    generation_batch = _generation_batch_size(inputs)
    s = generation_batch // (b * w)
    p = generation_batch // inputs.num_generations
    rollouts_per_epoch = inputs.num_prompts // p
    micro_steps = rollouts_per_epoch * inputs.num_iterations * s
    updates = math.ceil(micro_steps / a)
    max_steps = inputs.max_steps or math.ceil(inputs.num_train_epochs * updates)
    rollouts = _rollouts(max_steps, updates, rollouts_per_epoch, a, s * inputs.num_iterations)
    max_completions = rollouts * generation_batch * (1 + inputs.max_resample_times * inputs.dynamic_sample)
    warmup = inputs.warmup_steps
    return Plan(
        num_prompts=inputs.num_prompts,
        num_generations=inputs.num_generations,
        per_device_train_batch_size=b,
        num_processes=w,
        gradient_accumulation_steps=a,
        steps_per_generation=s,
        num_iterations=inputs.num_iterations,
        generation_batch_size=generation_batch,
        effective_batch_size=b * w * a,
        prompts_per_generation=p,
        expanded_dataset_size=inputs.num_prompts * inputs.num_generations,
        dropped_prompts_per_epoch=inputs.num_prompts % p,
        rollouts_per_epoch=rollouts_per_epoch,
        micro_steps_per_epoch=micro_steps,
        updates_per_epoch=updates,
        max_steps=max_steps,
        rollouts=rollouts,
        prompts_seen=rollouts * p,
        prompts_dropped=rollouts // rollouts_per_epoch * (inputs.num_prompts % p),
        completions=rollouts * generation_batch,
        max_completions=max_completions,
        max_completion_tokens=max_completions * inputs.max_completion_length,
        evaluations=math.ceil(max_steps / inputs.eval_steps) if inputs.eval_steps else 0,
        warmup_steps=math.ceil(warmup * max_steps) if warmup < 1 else math.ceil(warmup),
    )


def _rollouts(updates: int, updates_per_epoch: int, rollouts_per_epoch: int, a: int, micro_steps: int) -> int:
    """Generation batches that the first `updates` updates read; `micro_steps`: those that one batch feeds."""
    epochs, rest = divmod(updates, updates_per_epoch)
    return epochs * rollouts_per_epoch + min(math.ceil(rest * a / micro_steps), rollouts_per_epoch)


def plan_inputs(config: RunConfig, num_prompts: int) -> PlanInputs:
    """The part of a configuration that the plan follows from."""
    known = {field.name for field in dataclasses.fields(PlanInputs)}
    values = {**config.train.model_dump(), **config.rollout.model_dump(), "num_prompts": num_prompts}
    return PlanInputs(**{key: value for key, value in values.items() if key in known})


def load_plan(path: Path) -> Plan:
    """Read the `plan` object of a plan.json."""
    return Plan(**json.loads(path.read_text())["plan"])


def _generation_batch_size(inputs: PlanInputs) -> int:
    steps = inputs.steps_per_generation or inputs.gradient_accumulation_steps
    return inputs.generation_batch_size or inputs.per_device_train_batch_size * inputs.num_processes * steps


def _problems(inputs: PlanInputs) -> list[str]:
    per_micro_step = inputs.per_device_train_batch_size * inputs.num_processes
    generation_batch = _generation_batch_size(inputs)
    g = inputs.num_generations
    if generation_batch % per_micro_step:
        return [
            f"generation_batch_size={generation_batch} is not a multiple of per_device_train_batch_size·num_processes"
            f"={inputs.per_device_train_batch_size}·{inputs.num_processes}={per_micro_step}: it must be cut into "
            "whole micro-steps"
        ]
    if g < 2:
        return [f"num_generations={g} leaves nothing to compare: a group needs at least 2 completions"]
    if generation_batch % g:
        valid = [n for n in range(2, generation_batch + 1) if generation_batch % n == 0]
        return [
            f"generation_batch_size={generation_batch} (per_device_train_batch_size·num_processes·"
            f"steps_per_generation={inputs.per_device_train_batch_size}·{inputs.num_processes}·"
            f"{generation_batch // per_micro_step}) is not divisible by num_generations={g}: every group must be "
            f"whole. Valid num_generations for this batch: {', '.join(map(str, valid)) or 'none'}"
        ]
    if inputs.num_prompts < generation_batch // g:
        return [
            f"{inputs.num_prompts} prompts do not fill one generation batch of {generation_batch // g} prompts "
            f"(generation_batch_size {generation_batch} / num_generations {g}): the run would have no update"
        ]
    return []


def _fixes(inputs: PlanInputs) -> Iterator[dict[str, int]]:
    """The nearest valid value of each key alone; valid by construction, since each is checked by the rules."""
    keys = [
        "num_generations",
        "per_device_train_batch_size",
        "num_processes",
        *(["gradient_accumulation_steps"] if inputs.steps_per_generation is None else ["steps_per_generation"]),
    ]
    if inputs.generation_batch_size is not None:
        keys[-1] = "generation_batch_size"
    for key in keys:
        present = getattr(inputs, key)
        for value in _nearest_first(present, 4 * max(present, inputs.num_generations)):
            changed: Any = {key: value}
            if not _problems(dataclasses.replace(inputs, **changed)):
                yield {key: value}
                break


def _nearest_first(value: int, limit: int) -> Iterable[int]:
    return sorted((n for n in range(1, limit + 1) if n != value), key=lambda n: abs(n - value))


def _assignment(fix: dict[str, int]) -> str:
    return ", ".join(f"{key}={value}" for key, value in fix.items())
