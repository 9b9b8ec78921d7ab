"""The inputs of a plan, and the valid combinations of them, by this project's rules and other systems'.

Symbols: N prompts, G num_generations, b per_device_train_batch_size (completions), W processes, A
gradient_accumulation_steps, S steps_per_generation. What G has to divide: b·W·S here, in TRL since 0.18 and in
ms-swift (b·W·A in TRL 0.17 and b·W in TRL 0.16, see `frameworks.legacy_trl`). Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from grpo_core.planning.plan import Plan

Rules = Literal["grpo", "trl-1.16", "trl-0.17", "trl-0.16", "swift-4.6"]


@dataclass(frozen=True)
class BatchRules:
    """Batch rules that differ per framework, besides the arithmetic in `frameworks`."""

    sets_generation_batch: bool = True  # it has steps_per_generation and generation_batch_size
    takes_both_sizes: bool = False  # steps_per_generation and generation_batch_size together, if they agree
    fills_evaluation_batch: bool = False  # the evaluation prompts have to fill one batch
    refuses_long_warmup: bool = False  # longer than the run


FRAMEWORKS: dict[Rules, BatchRules] = {
    "grpo": BatchRules(refuses_long_warmup=True),
    "trl-1.16": BatchRules(),
    "trl-0.17": BatchRules(sets_generation_batch=False),
    "trl-0.16": BatchRules(sets_generation_batch=False),
    "swift-4.6": BatchRules(takes_both_sizes=True, fills_evaluation_batch=True),
}
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


@dataclass(frozen=True)
class PlannedSource:
    """One of several sources of training prompts."""

    name: str
    num_prompts: int  # rows
    prompts_per_epoch: int  # of these, in each epoch


@dataclass(frozen=True)
class PlanInputs:
    """The numbers that a plan follows from; names and defaults are those of the configuration."""

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
    max_tokens_per_pass: int | None = None
    sources: tuple[PlannedSource, ...] = ()  # if there are several; num_prompts is what they give per epoch
    rules: Rules = "grpo"
    has_teacher: bool = False  # or demonstrations, and no reward counts: their signal needs no group to compare with
    # Other systems evaluate in batches of groups. None: no evaluation.
    per_device_eval_batch_size: int | None = None
    num_generations_eval: int | None = None
    num_eval_prompts: int | None = None

    @property
    def framework(self) -> BatchRules:
        return FRAMEWORKS[self.rules]

    @property
    def generation_batch(self) -> int:
        """Completions that one rollout samples, over all processes."""
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        return self.generation_batch_size or self.per_device_train_batch_size * self.num_processes * steps

    @property
    def prompt_batch(self) -> int:
        """Completions of the prompts that are drawn together; an epoch drops the prompts that do not fill one."""
        return self.generation_batch

    @property
    def batch_factors(self) -> str:
        """The product that the generation batch is, as part of a sentence."""
        b, w = self.per_device_train_batch_size, self.num_processes
        steps = self.generation_batch // (b * w)
        return f"per_device_train_batch_size·num_processes·steps_per_generation={b}·{w}·{steps}"

    @property
    def eval_generations(self) -> int:
        return self.num_generations_eval or self.num_generations

    # The following hold only if the batches are valid.

    @property
    def dropped_prompts_per_epoch(self) -> int:
        return self.num_prompts % (self.prompt_batch // self.num_generations)

    @property
    def rollouts_per_epoch(self) -> int:
        return (self.num_prompts - self.dropped_prompts_per_epoch) // (self.generation_batch // self.num_generations)

    @property
    def micro_steps_per_rollout(self) -> int:
        slices = self.generation_batch // (self.per_device_train_batch_size * self.num_processes)
        return slices * self.num_iterations

    @property
    def updates_per_epoch(self) -> int:
        return math.ceil(self.rollouts_per_epoch * self.micro_steps_per_rollout / self.gradient_accumulation_steps)

    @property
    def total_updates(self) -> int:
        """Updates that the run is planned for."""
        return self.max_steps or math.ceil(self.num_train_epochs * self.updates_per_epoch)

    @property
    def updates_done(self) -> int:
        """Updates after which the run ends."""
        return self.total_updates

    @property
    def rollouts(self) -> int:
        """Generation batches that the whole run samples."""
        return rollouts_of(self, self.total_updates)


def rollouts_of(plan: PlanInputs | Plan, updates: int) -> int:
    """Generation batches that the first `updates` updates of a plan read."""
    epochs, rest = divmod(updates, plan.updates_per_epoch)
    micro_steps = rest * plan.gradient_accumulation_steps
    return epochs * plan.rollouts_per_epoch + math.ceil(micro_steps / plan.micro_steps_per_rollout)


def problems(inputs: PlanInputs) -> list[str]:
    """Every broken rule, with the values that break it; empty for a valid run."""
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
    b, w, g = inputs.per_device_eval_batch_size, inputs.num_processes, inputs.eval_generations
    if b is None or g < 1:
        return None
    if b * w % g:
        return (
            f"per_device_eval_batch_size·num_processes={b}·{w}={b * w} is not divisible by the {g} generations of an "
            "evaluation (num_generations_eval, or num_generations): an evaluation batch must hold whole groups"
        )
    there = inputs.num_eval_prompts
    if not inputs.framework.fills_evaluation_batch or there is None or there >= b * w // g:
        return None
    prompts = f"{b * w // g} prompts ({b}·{w} completions / {g})"
    return f"{there} evaluation prompts do not fill one evaluation batch of {prompts}"


def warmup_problem(inputs: PlanInputs) -> str | None:
    """The problem of a warm-up that is longer than the run; other systems accept it silently. Batches must be valid."""
    if not inputs.framework.refuses_long_warmup or inputs.warmup_steps <= (updates := inputs.total_updates):
        return None
    return (
        f"warmup_steps={inputs.warmup_steps:g} is longer than the run's {updates} updates: the learning rate would "
        f"never reach its value. Give at most {updates}, or a share of the run, below 1"
    )


def divisors(n: int) -> list[int]:
    """Divisors up to LARGEST_DIVISOR and their counterparts, ascending: all divisors if n is at most its square."""
    small = [d for d in range(1, min(math.isqrt(n), LARGEST_DIVISOR) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def _some_divisors(n: int) -> str:
    valid = [str(divisor) for divisor in divisors(n)[1:]]
    return ", ".join([*valid[:SHOWN_DIVISORS], *(["…"] if len(valid) > SHOWN_DIVISORS else [])]) or "none"


def _batch_problems(inputs: PlanInputs) -> Iterator[str]:
    b, w, g = inputs.per_device_train_batch_size, inputs.num_processes, inputs.num_generations
    s, batch = inputs.steps_per_generation, inputs.generation_batch_size
    for name in POSITIVE:
        value = getattr(inputs, name)
        if value is not None and not value > 0:
            yield f"{name}={value:g} is not positive"
        if value is not None and value > LARGEST:
            yield f"{name}={value:g} is beyond {LARGEST:g}: no run has that many"
    if not 0 <= inputs.warmup_steps <= LARGEST:
        yield f"warmup_steps={inputs.warmup_steps:g} is not a number of updates: it must lie between 0 and {LARGEST:g}"
    if not inputs.framework.sets_generation_batch and (s or batch):
        given = f"steps_per_generation={s}" if s else f"generation_batch_size={batch}"
        yield f"{given}: {inputs.rules} has no such setting, since each update has its own rollout there; remove it"
    if s and batch and (not inputs.framework.takes_both_sizes or batch != b * w * s):
        yield (
            f"steps_per_generation={s} and generation_batch_size={batch} are both given"
            + (f" and do not agree: {b}·{w}·{s}={b * w * s}" if inputs.framework.takes_both_sizes else "")
            + "; each follows from the other: remove one"
        )
    if inputs.generation_batch % (b * w):
        yield (
            f"generation_batch_size={inputs.generation_batch} is not a multiple of per_device_train_batch_size·"
            f"num_processes={b}·{w}={b * w}: it must be cut into whole micro-steps"
        )
    if g < 2 and not inputs.has_teacher:
        yield (
            f"num_generations={g} leaves nothing to compare: a group needs at least 2 completions, except where a "
            "teacher teaches alone ([teacher], and every reward with weight 0)"
        )
    if inputs.generation_batch % g:
        yield (
            f"generation_batch_size={inputs.generation_batch} ({inputs.batch_factors}) is not divisible by "
            f"num_generations={g}: {WHOLE_GROUPS}"
        )
    for source in inputs.sources:
        if not source.prompts_per_epoch:
            yield (
                f"the source {source.name!r} with {source.num_prompts} prompts gives none per epoch: raise its epochs, "
                "or its weight against those of the smallest sources, or leave it out"
            )
    if inputs.num_prompts < inputs.prompt_batch // g:
        yield (
            f"{inputs.num_prompts} prompts do not fill one generation batch of {inputs.prompt_batch // g} prompts "
            f"({inputs.prompt_batch} completions / num_generations {g}): the run would have no update"
        )


def division(batch: Mapping[str, int], num_processes: int, max_rows: int) -> dict[str, int] | None:
    """Keys of `train` under which that many processes have this batch; None if there are none.

    `batch`: `fingerprint.batch_of` a configuration. `max_rows`: completions per process and micro-step,
    kept if possible.
    """
    update, generation = batch["completions_per_update"], batch["completions_per_generation"]
    each, rest = divmod(math.gcd(update, generation), num_processes)
    sizes = [b for b in range(1, each + 1) if each % b == 0 and b == batch.get("per_device_train_batch_size", b)]
    if rest or not sizes:
        return None
    b = max((b for b in sizes if b <= max_rows), default=min(sizes))
    return {
        "per_device_train_batch_size": b,
        "gradient_accumulation_steps": update // (b * num_processes),
        "steps_per_generation": generation // (b * num_processes),
    }
