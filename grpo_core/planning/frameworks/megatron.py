"""The plan of GRPO in Megatron-SWIFT (ms-swift 4.6), by its own arithmetic and in its own terms.

N prompts, G num_generations, b micro_batch_size and B global_batch_size (completions), S steps_per_generation (updates
of one generation batch), D data-parallel replicas: processes / (tensor · pipeline · context parallel size).
swift/megatron/arguments/megatron_args.py: generation batch (261), its rules (298, 941), train_iters (1039).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from grpo_core.planning.plan import Plan, PlanError, warmup_notes
from grpo_core.planning.suggestions import SHOWN, Fix

MEGATRON_KEYS = {
    "micro_batch_size",
    "global_batch_size",
    "train_iters",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
}
POSITIVE = MEGATRON_KEYS | {
    "num_prompts",
    "world_size",
    "num_generations",
    "max_completion_length",
    "steps_per_generation",
    "generation_batch_size",
    "num_train_epochs",
}
SMALL = 64  # values of a key that are tried from 1 on


@dataclass(frozen=True)
class MegatronInputs:
    """The numbers that the plan follows from; names and defaults are ms-swift's. `world_size`: training processes."""

    num_prompts: int
    world_size: int = 1
    num_generations: int = 8
    max_completion_length: int = 512
    micro_batch_size: int = 1
    global_batch_size: int = 16
    steps_per_generation: int | None = None
    generation_batch_size: int | None = None
    num_train_epochs: int | None = None
    train_iters: int | None = None
    num_iterations: int = 1
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    lr_warmup_iters: int = 0
    lr_warmup_fraction: float | None = None
    dynamic_sample: bool = False
    max_resample_times: int = 3
    has_group_loss: bool = False  # loss_type real
    ray: bool = False
    rules: str = "swift-4.6 (Megatron)"

    @property
    def model_parallel(self) -> int:
        """Processes that hold one replica of the model together."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def replicas(self) -> int:
        return self.world_size // self.model_parallel

    @property
    def updates_per_generation(self) -> int:
        if self.steps_per_generation:
            return self.steps_per_generation
        return (self.generation_batch_size or self.global_batch_size) // self.global_batch_size

    @property
    def generation_batch(self) -> int:
        return self.global_batch_size * self.updates_per_generation

    @property
    def prompts_per_generation(self) -> int:
        return self.generation_batch // self.num_generations

    @property
    def prompts_per_epoch(self) -> int:
        """An epoch drops the prompts that do not fill a micro-batch of every replica."""
        return self.num_prompts // (self.micro_batch_size * self.replicas) * self.micro_batch_size * self.replicas

    @property
    def updates(self) -> int:
        """`train_iters`, unless num_train_epochs is given, which takes precedence."""
        if self.num_train_epochs is None:
            return self.train_iters or 0
        return self.prompts_per_epoch * self.num_generations * self.num_train_epochs // self.global_batch_size

    @property
    def updates_done(self) -> int:
        """Updates after which the run ends.

        Without Ray a rollout that needs prompts beyond the last epoch is the last one, and feeds one update alone
        (`cyclic_iter`, swift/megatron/trainers/base.py:258).
        """
        if self.ray or self.num_train_epochs is None:
            return self.updates
        full_rollouts = self.prompts_per_epoch * self.num_train_epochs // self.prompts_per_generation
        return min(self.updates, full_rollouts * self.updates_per_generation + 1)

    @property
    def warmup(self) -> int:
        if self.lr_warmup_fraction is None:
            return self.lr_warmup_iters
        return math.ceil(self.lr_warmup_fraction * self.updates)


def megatron_plan(inputs: MegatronInputs) -> Plan:
    """Compute the plan. Raises PlanError if a rule is broken. Processes are counted in replicas of the model."""
    if problem := next(_problems(inputs), None):
        raise PlanError(inputs, [problem], _fixes(inputs))
    p, s = inputs.prompts_per_generation, inputs.updates_per_generation
    accumulation = inputs.global_batch_size // (inputs.micro_batch_size * inputs.replicas)
    rollouts = math.ceil(inputs.updates_done / s)
    per_epoch = inputs.num_prompts // p * p if inputs.ray else inputs.prompts_per_epoch
    dropped = inputs.num_prompts - per_epoch
    max_completions = rollouts * inputs.generation_batch
    max_completions *= 1 + inputs.max_resample_times * inputs.dynamic_sample
    return Plan(
        num_prompts=inputs.num_prompts,
        num_generations=inputs.num_generations,
        per_device_train_batch_size=inputs.micro_batch_size,
        num_processes=inputs.replicas,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=s * accumulation,
        num_iterations=1,
        generation_batch_size=inputs.generation_batch,
        effective_batch_size=inputs.global_batch_size,
        prompts_per_generation=p,
        expanded_dataset_size=inputs.num_prompts * inputs.num_generations,
        dropped_prompts_per_epoch=dropped,
        rollouts_per_epoch=per_epoch // p,
        micro_steps_per_epoch=per_epoch * inputs.num_generations // (inputs.micro_batch_size * inputs.replicas),
        updates_per_epoch=per_epoch * inputs.num_generations // inputs.global_batch_size,
        max_steps=inputs.updates,
        rollouts=rollouts,
        prompts_seen=rollouts * p,
        prompts_dropped=rollouts * p // per_epoch * dropped,
        completions=rollouts * inputs.generation_batch,
        max_completions=max_completions,
        max_completion_tokens=max_completions * inputs.max_completion_length,
        evaluations=0,
        warmup_steps=inputs.warmup,
    )


def megatron_notes(inputs: MegatronInputs, plan: Plan) -> list[str]:
    """Sentences about what the figures alone do not say."""
    notes = []
    if plan.dropped_prompts_per_epoch:
        unit = "a generation batch" if inputs.ray else "a micro-batch of every replica"
        notes.append(
            f"{plan.dropped_prompts_per_epoch} of {plan.num_prompts} prompts are left out of each epoch: they do not "
            f"fill {unit}"
        )
    if (done := inputs.updates_done) < plan.max_steps:
        notes.append(
            f"{plan.max_steps} updates are planned but the run ends after {done}: the prompts of its last epoch do not "
            "fill another generation batch"
        )
    notes += warmup_notes(plan)
    if inputs.model_parallel > 1:
        notes.append(
            f"num_processes counts the {inputs.replicas} replicas of the model that {inputs.world_size} processes hold "
            f"(tensor {inputs.tensor_model_parallel_size} · pipeline {inputs.pipeline_model_parallel_size} · context "
            f"{inputs.context_parallel_size})"
        )
    if inputs.num_train_epochs is not None and inputs.train_iters is not None:
        notes.append(f"train_iters={inputs.train_iters} does not count: num_train_epochs takes precedence")
    return notes


def _problems(inputs: MegatronInputs) -> Iterator[str]:
    """Broken rules, in order; the later ones mean nothing before the earlier ones hold."""
    for name in sorted(POSITIVE):
        value = getattr(inputs, name)
        if value is not None and value <= 0:
            yield f"{name}={value} is not positive"
    g, b, batch = inputs.num_generations, inputs.micro_batch_size, inputs.global_batch_size
    replicas = inputs.replicas
    if inputs.num_iterations > 1:
        yield f"num_iterations={inputs.num_iterations}: Megatron-SWIFT passes over a generation batch once"
    if inputs.num_train_epochs is None and inputs.train_iters is None:
        yield "neither num_train_epochs nor train_iters is given: Megatron-SWIFT has no default length"
    if inputs.world_size % inputs.model_parallel:
        yield (
            f"{inputs.world_size} processes are not a multiple of the {inputs.model_parallel} that hold one model "
            f"(tensor {inputs.tensor_model_parallel_size} · pipeline {inputs.pipeline_model_parallel_size} · context "
            f"{inputs.context_parallel_size})"
        )
    if batch % (b * replicas):
        yield (
            f"global_batch_size={batch} is not a multiple of micro_batch_size·replicas={b}·{replicas}={b * replicas}: "
            "an update must be cut into whole micro-batches"
        )
    given, s = inputs.generation_batch_size, inputs.steps_per_generation
    if given and (given % batch or (s and given != batch * s)):
        agree = f"global_batch_size·steps_per_generation={batch}·{s}" if s else f"a multiple of {batch}"
        yield f"generation_batch_size={given} is not {agree}: it must be cut into whole updates"
    if inputs.generation_batch % g:
        yield (
            f"generation_batch_size={inputs.generation_batch} (global_batch_size·steps_per_generation={batch}·"
            f"{inputs.updates_per_generation}) is not divisible by num_generations={g}: every group must be whole"
        )
    if inputs.prompts_per_generation % (replicas * b):
        yield (
            f"a generation batch of {inputs.prompts_per_generation} prompts ({inputs.generation_batch} completions / "
            f"num_generations {g}) is not a multiple of micro_batch_size·replicas={b}·{replicas}={b * replicas}: "
            "prompts are read in micro-batches too"
        )
    if inputs.generation_batch % inputs.world_size and not inputs.ray:
        yield (
            f"generation_batch_size={inputs.generation_batch} is not a multiple of the {inputs.world_size} processes, "
            "which sample equal shares"
        )
    if inputs.has_group_loss and b % g:
        yield f"micro_batch_size={b} is not a multiple of num_generations={g}: loss_type=real needs whole groups in it"
    needed = inputs.prompts_per_generation if inputs.ray else b * replicas
    if inputs.num_prompts < needed:
        yield f"{inputs.num_prompts} prompts do not fill one batch of {needed} prompts: the run would have no update"
    if inputs.updates < 1:
        yield (
            f"{inputs.prompts_per_epoch} prompts · {g} · {inputs.num_train_epochs} epochs do not fill one update of "
            f"{batch} completions"
        )


def _fixes(inputs: MegatronInputs) -> list[Fix]:
    """Nearest valid runs that differ in one key: small values of each, and whole numbers of prompts in the batch."""
    if any(value is not None and value <= 0 for value in (getattr(inputs, name) for name in POSITIVE)):
        return []
    if inputs.world_size % inputs.model_parallel:
        return []
    unit = math.lcm(inputs.micro_batch_size * inputs.replicas * inputs.num_generations, inputs.world_size)
    unit //= math.gcd(unit, inputs.steps_per_generation or 1)
    near = inputs.global_batch_size // unit * unit
    tried = {
        "num_generations": range(2, SMALL + 1),
        "micro_batch_size": range(1, SMALL + 1),
        "global_batch_size": sorted({*range(1, SMALL + 1), near, near + unit} - {0}),
    }
    wanted = inputs.generation_batch_size or inputs.generation_batch
    found = []
    for key, values in tried.items():
        present = getattr(inputs, key)
        nearest = sorted((abs(math.log2(value / present)), value) for value in values if value != present)
        for distance, value in nearest:
            changes: dict[str, Any] = {key: value}
            changed = replace(inputs, **changes)
            if next(_problems(changed), None) is None:
                ratio = abs(math.log2(changed.generation_batch / wanted))
                kept = changed.generation_batch == wanted
                found.append(Fix({key: value}, changed.generation_batch, kept, round(1 + distance + ratio, 3)))
                break
    return sorted(found, key=lambda fix: fix.cost)[:SHOWN]
