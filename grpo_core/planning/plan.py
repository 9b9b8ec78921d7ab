"""The arithmetic of a run: batches, steps, dropped prompts, warm-up, tokens. Invalid runs are refused, with fixes.

Symbols: N prompts, G num_generations, b per_device_train_batch_size (completions), W processes, A
gradient_accumulation_steps, S steps_per_generation, P prompts per generation batch, mu num_iterations. The rules are
TRL's (1.16); the trainer performs exactly `Plan.max_steps` updates. What other systems do otherwise is in `frameworks`.
Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_core.config.inputs import DataSource
from grpo_core.config.run import RunConfig
from grpo_core.config.teacher import teaches_alone
from grpo_core.errors import GrpoError
from grpo_core.planning.rules import PlanInputs, PlannedSource, problems, rollouts_of
from grpo_core.planning.suggestions import Fix, fixes


class PlanError(GrpoError):
    """An invalid combination. `problems`: which value breaks which rule; `fixes`: the nearest valid ones."""

    def __init__(self, inputs: Any, problems: list[str], fixes: list[Fix]):
        self.inputs = inputs
        self.problems = problems
        self.fixes = fixes
        lines = [*problems]
        if fixes:
            lines.append("any one of these works: " + "; ".join(describe(fix) for fix in fixes))
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class MicroStep:
    """b completions per process of an update: part `slice` (of S) of generation batch `rollout` (counted from 0)."""

    rollout: int
    slice: int


@dataclass(frozen=True)
class Plan:
    """A valid run in figures; batch sizes are completions, over all processes unless `per_device`."""

    num_prompts: int  # N, per epoch
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
    prompts_seen: int  # P·rollouts; a prompt counts once per epoch
    prompts_dropped: int  # over the epochs that the run completes
    completions: int  # trained on
    max_completions: int  # sampled, if every round of dynamic sampling replaces every group
    max_completion_tokens: int
    evaluations: int  # on the held-out prompts, during training
    warmup_steps: int
    sources: tuple[PlannedSource, ...] = ()
    max_tokens_per_pass: int | None = None  # of one process; None: those of b sequences of the greatest length

    @property
    def micro_steps_per_rollout(self) -> int:
        return self.steps_per_generation * self.num_iterations

    @property
    def on_policy(self) -> bool:
        """True if each update uses up the rollouts that it reads, so that the sampling policy is the current one."""
        return self.gradient_accumulation_steps % self.micro_steps_per_rollout == 0

    def micro_steps(self, step: int) -> Iterator[MicroStep]:
        """The micro-steps of update `step` (from 0): A of them, fewer in an epoch's last update if A does not divide.

        A pure function of `step`, so a run's place is one number.
        """
        epoch, update = divmod(step, self.updates_per_epoch)
        first = update * self.gradient_accumulation_steps
        last = min(first + self.gradient_accumulation_steps, self.micro_steps_per_epoch)
        for micro_step in range(first, last):
            window, position = divmod(micro_step, self.micro_steps_per_rollout)
            yield MicroStep(epoch * self.rollouts_per_epoch + window, position % self.steps_per_generation)

    @property
    def source_sizes(self) -> list[int]:
        """Prompts of each source, as `plan_inputs` was given them; N without sources."""
        return [source.num_prompts for source in self.sources] or [self.num_prompts]

    def counts(self, updates: int) -> dict[str, int]:
        """Generation batches, prompts seen and dropped, and completions of the first `updates` updates."""
        rollouts = rollouts_of(self, updates)
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
    """Compute the plan. Raises PlanError if a rule is broken."""
    if broken := problems(inputs):
        raise PlanError(inputs, broken, fixes(inputs))
    b, w, a = inputs.per_device_train_batch_size, inputs.num_processes, inputs.gradient_accumulation_steps
    generation_batch = inputs.generation_batch
    s = generation_batch // (b * w)
    p = generation_batch // inputs.num_generations
    max_steps, rollouts = inputs.total_updates, inputs.rollouts
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
        dropped_prompts_per_epoch=inputs.dropped_prompts_per_epoch,
        rollouts_per_epoch=inputs.rollouts_per_epoch,
        micro_steps_per_epoch=inputs.rollouts_per_epoch * inputs.micro_steps_per_rollout,
        updates_per_epoch=inputs.updates_per_epoch,
        max_steps=max_steps,
        rollouts=rollouts,
        prompts_seen=rollouts * p,
        prompts_dropped=rollouts // inputs.rollouts_per_epoch * inputs.dropped_prompts_per_epoch,
        completions=rollouts * generation_batch,
        max_completions=max_completions,
        max_completion_tokens=max_completions * inputs.max_completion_length,
        evaluations=math.ceil(max_steps / inputs.eval_steps) if inputs.eval_steps else 0,
        warmup_steps=math.ceil(warmup * max_steps) if warmup < 1 else int(warmup),
        sources=inputs.sources,
        max_tokens_per_pass=inputs.max_tokens_per_pass,
    )


def describe(fix: Fix) -> str:
    """A fix in words."""
    changes = [f"remove {key}" if value is None else f"{key}={value}" for key, value in fix.changes.items()]
    kept = "the same" if fix.keeps_generation_batch else "a"
    return f"{', '.join(changes)} ({kept} batch of {fix.generation_batch_size})"


def plan_rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A plan as the rows of a table, without its sources and what is not known."""
    return [(name, f"{value:,}") for name, value in figures.items() if name != "sources" and value is not None]


def source_table(sources: Mapping[str, Mapping[str, float]]) -> Iterator[list[str]]:
    """The counts of each source, see `data.order.source_counts`, as the rows of a table, its head first."""
    for number, (name, counts) in enumerate(sources.items()):
        if number == 0:
            yield ["source", *counts]
        yield [name, *(f"{value:,}" for value in counts.values())]


def notes(inputs: PlanInputs, plan: Plan) -> list[str]:
    """Sentences about what the figures alone do not say."""
    found = []
    if plan.dropped_prompts_per_epoch:
        found.append(
            f"{plan.dropped_prompts_per_epoch} of {plan.num_prompts} prompts are left out of each epoch, because they "
            "do not fill a generation batch; each epoch is shuffled again, so they are different ones each time"
        )
    if inputs.updates_done < plan.max_steps:
        found.append(
            f"{inputs.rules} plans {plan.max_steps} updates but ends after {inputs.updates_done}: it counts the "
            "prompts that it then drops, and its learning rate never reaches the end of its schedule"
        )
    return found + warmup_notes(plan)


def warmup_notes(plan: Plan) -> list[str]:
    """A note about a warm-up that outlasts the run, if it does: this project refuses it, other systems do not."""
    if plan.warmup_steps <= plan.max_steps:
        return []
    return [
        f"the warm-up of {plan.warmup_steps} updates is longer than the run: the learning rate never reaches its value"
    ]


def plan_inputs(config: RunConfig, *num_prompts: int) -> PlanInputs:
    """The part of a configuration that the plan follows from. `num_prompts`: training prompts of each source."""
    known = {field.name for field in dataclasses.fields(PlanInputs)}
    sources = planned_sources(config.data.sources, num_prompts)
    per_epoch = sum(source.prompts_per_epoch for source in sources) if sources else num_prompts[0]
    values: dict[str, Any] = {**config.train.model_dump(), **config.rollout.model_dump()}
    values |= {"num_prompts": per_epoch, "sources": sources, "has_teacher": teaches_alone(config)}
    return PlanInputs(**{key: value for key, value in values.items() if key in known})


def planned_sources(sources: Sequence[DataSource], num_prompts: Sequence[int]) -> tuple[PlannedSource, ...]:
    """Number of prompts that each source gives per epoch. With weights, an epoch uses up the source that has the fewest
    prompts for its weight, and takes as many of the others as their weights say."""
    if not sources:
        return ()
    passes = min(n / (source.weight or 1) for source, n in zip(sources, num_prompts, strict=True))
    return tuple(
        PlannedSource(
            source.name, n, round(n * (source.epochs or 1) if source.weight is None else passes * source.weight)
        )
        for source, n in zip(sources, num_prompts, strict=True)
    )


def load_plan(path: Path) -> Plan:
    """Read the `plan` object of a plan.json."""
    return read_plan(json.loads(path.read_text())["plan"])


def read_plan(values: Mapping[str, Any]) -> Plan:
    """Rebuild a plan from its `dataclasses.asdict`."""
    known = dict(values)
    known["sources"] = tuple(PlannedSource(**each) for each in values.get("sources", ()))
    return Plan(**known)
