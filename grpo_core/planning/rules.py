"""Which combinations of batch sizes, generations and processes a run may have: this project's rules and other systems'.

Symbols: N prompts, G num_generations, b per_device_train_batch_size (completions), W processes, A
gradient_accumulation_steps, S steps_per_generation. What G has to divide: b·W·S here, in TRL since 0.18 and in
ms-swift; b·W·A in TRL 0.17; b·W in TRL up to 0.16. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Rules = Literal["grpo", "trl-1.16", "trl-0.17", "trl-0.16", "swift-4.6"]
POSITIVE = (
    "num_prompts",
    "num_generations",
    "per_device_train_batch_size",
    "max_completion_length",
    "num_processes",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
    "num_iterations",
    "num_train_epochs",
    "max_steps",
    "per_device_eval_batch_size",
    "num_generations_eval",
)
LARGEST_DIVISOR = 1_000
SHOWN_DIVISORS = 20
WHOLE_GROUPS = "every group must be whole"
LARGEST = 10**18  # of any number: beyond it there is no run, and floating-point arithmetic ends
LEGACY = ("trl-0.17", "trl-0.16")  # a rollout belongs to an update: no steps_per_generation, no generation_batch_size


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
    rules: Rules = "grpo"
    has_teacher: bool = False  # ms-swift: a teacher's signal needs no group to compare with
    # Other systems evaluate in batches of groups; None: this run does not.
    per_device_eval_batch_size: int | None = None
    num_generations_eval: int | None = None
    num_eval_prompts: int | None = None

    @property
    def generation_batch(self) -> int:
        """Completions that one rollout samples, over all processes."""
        micro_step = self.per_device_train_batch_size * self.num_processes
        if self.rules == "trl-0.16":
            return micro_step
        return self.generation_batch_size or micro_step * (
            self.steps_per_generation or self.gradient_accumulation_steps
        )

    @property
    def prompt_batch(self) -> int:
        """Completions of the prompts that are drawn together: what is left of an epoch below it is dropped."""
        if self.rules == "trl-0.16":
            return self.generation_batch * self.gradient_accumulation_steps
        return self.generation_batch

    @property
    def eval_generations(self) -> int:
        return self.num_generations_eval or self.num_generations


def problems(inputs: PlanInputs) -> list[str]:
    """Every rule that is broken, with the values that break it; none for a valid run."""
    first = batch_problem(inputs)
    if first and first.endswith(WHOLE_GROUPS):
        first += f". Valid num_generations for this batch: {_some_divisors(inputs.generation_batch)}"
    broken = (first, evaluation_problem(inputs), None if first else warmup_problem(inputs))
    return [problem for problem in broken if problem]


def batch_problem(inputs: PlanInputs) -> str | None:
    """The first broken rule of the training batches; the later ones mean nothing before it holds."""
    return next(_batch_problems(inputs), None)


def evaluation_problem(inputs: PlanInputs) -> str | None:
    """The broken rule of the evaluation batches, in systems that evaluate in batches."""
    return next(_evaluation_problems(inputs), None)


def warmup_problem(inputs: PlanInputs) -> str | None:
    """A warm-up that is longer than the run, of valid batches; other systems go on without a word."""
    if inputs.rules != "grpo" or inputs.warmup_steps <= (updates := total_updates(inputs)):
        return None
    return (
        f"warmup_steps={inputs.warmup_steps:g} is longer than the run's {updates} updates: the learning rate would "
        f"never reach its value. Give at most {updates}, or a share of the run, below 1"
    )


def divisors(n: int) -> list[int]:
    """Those up to LARGEST_DIVISOR and their counterparts, ascending: all divisors of any n up to its square."""
    small = [d for d in range(1, min(math.isqrt(n), LARGEST_DIVISOR) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def _some_divisors(n: int) -> str:
    valid = [str(divisor) for divisor in divisors(n)[1:]]
    return ", ".join([*valid[:SHOWN_DIVISORS], *(["…"] if len(valid) > SHOWN_DIVISORS else [])]) or "none"


def updates_per_epoch(inputs: PlanInputs) -> int:
    """Updates of one pass over the prompts, of valid batches."""
    if inputs.rules in LEGACY:
        return _legacy_updates_per_epoch(inputs)
    steps = inputs.generation_batch // (inputs.per_device_train_batch_size * inputs.num_processes)
    rollouts = inputs.num_prompts // (inputs.generation_batch // inputs.num_generations)
    return math.ceil(rollouts * inputs.num_iterations * steps / inputs.gradient_accumulation_steps)


def total_updates(inputs: PlanInputs) -> int:
    """Updates that a run of valid batches is planned for."""
    return inputs.max_steps or math.ceil(inputs.num_train_epochs * updates_per_epoch(inputs))


def _legacy_updates_per_epoch(inputs: PlanInputs) -> int:
    """transformers up to 4.51: floor(L/A), with L the batches of a sampler that counts the dropped prompts too."""
    b, w, a = inputs.per_device_train_batch_size, inputs.num_processes, inputs.gradient_accumulation_steps
    repeats = inputs.num_generations * inputs.num_iterations * (a if inputs.rules == "trl-0.17" else 1)
    batch = b * a if inputs.rules == "trl-0.17" else b
    return max(math.ceil(math.ceil(inputs.num_prompts * repeats / batch) / w) // a, 1)


def _batch_problems(inputs: PlanInputs) -> Iterator[str]:
    b, w, g = inputs.per_device_train_batch_size, inputs.num_processes, inputs.num_generations
    s, batch = inputs.steps_per_generation, inputs.generation_batch_size
    for name in POSITIVE:
        value = getattr(inputs, name)
        if value is not None and not value > 0:
            yield f"{name}={value:g} is not positive"
        if value is not None and value > LARGEST:
            yield f"{name}={value:g} is beyond {LARGEST:g}: no run has so many"
    if not 0 <= inputs.warmup_steps <= LARGEST:
        yield f"warmup_steps={inputs.warmup_steps:g} is no number of updates: it lies between 0 and {LARGEST:g}"
    if inputs.rules in LEGACY and (s or batch):
        given = f"steps_per_generation={s}" if s else f"generation_batch_size={batch}"
        yield f"{given}: {inputs.rules} has no such setting, a rollout belongs to one update there; remove it"
    if s and batch and (inputs.rules != "swift-4.6" or batch != b * w * s):
        yield (
            f"steps_per_generation={s} and generation_batch_size={batch} are both given"
            + (f" and do not agree: {b}·{w}·{s}={b * w * s}" if inputs.rules == "swift-4.6" else "")
            + "; each follows from the other: remove one"
        )
    if inputs.generation_batch % (b * w):
        yield (
            f"generation_batch_size={inputs.generation_batch} is not a multiple of per_device_train_batch_size·"
            f"num_processes={b}·{w}={b * w}: it must be cut into whole micro-steps"
        )
    if g < 2 and not inputs.has_teacher:
        yield f"num_generations={g} leaves nothing to compare: a group needs at least 2 completions"
    if inputs.generation_batch % g:
        yield (
            f"generation_batch_size={inputs.generation_batch} ({_factors(inputs)}) is not divisible by "
            f"num_generations={g}: {WHOLE_GROUPS}"
        )
    if inputs.num_prompts < inputs.prompt_batch // g:
        yield (
            f"{inputs.num_prompts} prompts do not fill one generation batch of {inputs.prompt_batch // g} prompts "
            f"({inputs.prompt_batch} completions / num_generations {g}): the run would have no update"
        )


def _evaluation_problems(inputs: PlanInputs) -> Iterator[str]:
    b, w, g = inputs.per_device_eval_batch_size, inputs.num_processes, inputs.eval_generations
    if b is None or g < 1:
        return
    if b * w % g:
        yield (
            f"per_device_eval_batch_size·num_processes={b}·{w}={b * w} is not divisible by the {g} generations of an "
            "evaluation (num_generations_eval, or num_generations): an evaluation batch must hold whole groups"
        )
    elif inputs.rules == "swift-4.6" and inputs.num_eval_prompts is not None and inputs.num_eval_prompts < b * w // g:
        yield (
            f"{inputs.num_eval_prompts} evaluation prompts do not fill one evaluation batch of {b * w // g} prompts "
            f"({b}·{w} completions / {g})"
        )


def _factors(inputs: PlanInputs) -> str:
    b, w = inputs.per_device_train_batch_size, inputs.num_processes
    if inputs.rules == "trl-0.16":
        return f"per_device_train_batch_size·num_processes={b}·{w}"
    third = "gradient_accumulation_steps" if inputs.rules == "trl-0.17" else "steps_per_generation"
    return f"per_device_train_batch_size·num_processes·{third}={b}·{w}·{inputs.generation_batch // (b * w)}"
