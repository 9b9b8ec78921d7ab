"""One optimizer update: forward and backward over this process's rows, one gradient over all processes, one step."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from grpo_core.algorithm.advantages import teacher_advantages
from grpo_core.algorithm.losses import token_losses
from grpo_core.config.algorithm import AlgorithmConfig
from grpo_core.distributed import (
    any_process,
    average_gradients,
    clip_gradients,
    max_over_processes,
    maxima_over_processes,
    own_shard,
    sum_over_processes,
)
from grpo_core.errors import NotFiniteError
from grpo_core.model.loading import trainable_state
from grpo_core.model.logprobs import Taught
from grpo_core.model.policy import PassInputs
from grpo_core.model.routing import balance_loss, choice_counts
from grpo_core.model.sequences import pack
from grpo_core.system.progress import moved, phase
from grpo_core.training.batch import MicroBatch, idle_row, own_rows, take
from grpo_core.training.interrupt import commit
from grpo_core.training.session import Session, teaching
from grpo_core.training.state import TrainingState


@phase("update")
def update(session: Session, batch: MicroBatch, state: TrainingState) -> dict[str, float]:
    """Accumulate the gradient of this process's rows of the batch, average it over the processes, and step.

    Returns global metrics. Those of tokens are means over the completions that have a gradient. With an adaptive
    entropy bonus, entropy is measured over all completions, even while the bonus is off.

    Raises NotFiniteError, with the metrics, if loss or gradient is not finite before the step, or a weight after it.
    The CPU waits for the device only to read the figures and whether the weights are finite, and for optimizer moments
    that are kept in its memory.
    """
    config, accelerator, optimizer = session.config, session.accelerator, session.optimizer
    entropy_coef = applied_entropy_coef(config.algorithm, state)
    session.policy.refresh()
    place = accelerator.process_index, accelerator.num_processes
    batch = own_rows(batch, config, *place, share_prompts=session.policy.packs)

    def prepared(parts: list[Tensor]) -> Iterator[tuple[PassInputs, MicroBatch]]:
        """What the model and the loss read in each pass. The CPU makes it while the device works on the pass before."""
        missing = max_over_processes(len(parts)) - len(parts) if session.policy.is_sharded else 0
        idle = itertools.repeat(idle_row(batch), missing)  # all processes gather the weights for each pass
        for some in itertools.chain((take(batch, part) for part in parts), idle):
            yield session.policy.prepare(some.sequences), some

    def accumulate(parts: list[Tensor]) -> _Tally:
        session.policy.zero_grad()  # of both copies: memory may have run out between the two
        tally = _Tally(accelerator.device)
        for inputs, some in prepared(parts):
            taught, on_device = _taught(session, some), some.to(accelerator.device)
            _forward_backward(session, inputs, on_device, taught, entropy_coef, tally, balance)
            del taught  # memory of the pass
            moved()
        return tally

    balance = None
    if config.algorithm.router_aux_loss_coef > 0:
        counts = session.memory.run(
            batch.sequences, lambda parts: _choice_counts(session, prepared(parts)), share_prompts=session.policy.packs
        )
        balance = sum_over_processes(counts)
    tally = session.memory.run(batch.sequences, accumulate, share_prompts=session.policy.packs)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    average_gradients(parameters)
    metrics = tally.read(session, grad_norm=clip_gradients(parameters, config.train.max_grad_norm))
    loss, grad_norm = metrics["loss"], metrics["grad_norm"]
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        optimizer.zero_grad()
        raise NotFiniteError(f"step {state.updates + 1}: loss {loss}, gradient norm {grad_norm}", metrics)
    commit()
    learning_rate = session.learning_rate(state.updates) * 0.5**state.roll_backs
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad()
    broken = not torch.stack([own_shard(parameter).isfinite().all() for parameter in parameters]).all()
    if session.policy.is_sharded:  # else all processes have the same weights
        broken = any_process(broken)
    if broken:
        raise NotFiniteError(f"step {state.updates + 1}: the weights after the update are not finite", metrics)
    if config.algorithm.has_entropy_bonus:
        metrics["entropy_coef"] = entropy_coef
    return {**metrics, "learning_rate": learning_rate}


def applied_entropy_coef(config: AlgorithmConfig, state: TrainingState) -> float:
    """Weight of the entropy bonus in the next update; an adaptive one rests while entropy is above the target."""
    if config.use_adaptive_entropy:
        return state.entropy_coef if state.last_entropy <= config.entropy_target else 0.0
    return config.entropy_coef


def adapt_entropy(config: AlgorithmConfig, state: TrainingState, entropy: float | None) -> TrainingState:
    """Adapt the entropy bonus as Skywork-OR1 (arXiv:2505.22312): its coefficient goes a step up while entropy is at or
    below its target, else a step down. `entropy`: None if no token was trained."""
    if entropy is None or not config.use_adaptive_entropy:
        return state
    step = config.entropy_coef_delta if entropy <= config.entropy_target else -config.entropy_coef_delta
    coef = min(max(state.entropy_coef + step, config.entropy_coef_min), config.entropy_coef_max)
    return replace(state, entropy_coef=coef, last_entropy=entropy)


@torch.no_grad()
def move_reference(session: Session, state: TrainingState) -> None:
    """Every ref_model_sync_steps updates, set reference ← alpha · policy + (1 − alpha) · reference (TR-DPO,
    arXiv:2404.09656)."""
    algorithm, reference = session.config.algorithm, session.reference
    if reference is None or not algorithm.sync_ref_model or state.updates % algorithm.ref_model_sync_steps:
        return
    for old, new in zip(reference.master.parameters(), session.model.parameters(), strict=True):
        old.lerp_(new.to(old.device), algorithm.ref_model_mixup_alpha)
    reference.refresh()


@torch.no_grad()
def move_average(session: Session) -> None:
    """Set average ← (1 − update_rate) · average + update_rate · policy, if the policy's average teaches (SDPO,
    arXiv:2601.20802)."""
    rate = session.config.teacher.update_rate
    if rate is not None and session.average is not None:
        policy = trainable_state(session.model)
        averages = [own_shard(average) for average in session.average.values()]
        torch._foreach_lerp_(averages, [own_shard(policy[name]) for name in session.average], rate)


class _Tally:
    """Sums and extremes over the passes, left on the device until the update is done."""

    def __init__(self, device: torch.device):
        self.sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=device))
        self.maxima: dict[str, Tensor] = defaultdict(lambda: torch.full((), -torch.inf, device=device))

    def add(self, name: str, values: Tensor, mask: Tensor) -> None:
        self.sums[name] += (values * mask).sum()

    def highest(self, name: str, values: Tensor, mask: Tensor) -> None:
        found = torch.where(mask > 0, values, -torch.inf).max()
        self.maxima[name] = torch.maximum(self.maxima[name], found)

    def read(self, session: Session, grad_norm: Tensor) -> dict[str, float]:
        """Return means over tokens, if there are any, extremes, loss and norm, over all processes; the same on each.

        The processes also agree on the tokens per pass: what fits everywhere.
        """
        fitting = torch.full((), -session.memory.tokens, dtype=torch.float64, device=grad_norm.device)
        sums = sum_over_processes(torch.stack([*self.sums.values()]))
        extremes = maxima_over_processes(torch.stack([value.double() for value in (*self.maxima.values(), fitting)]))
        *found, norm = torch.cat([sums.double(), extremes, grad_norm.double()[None]]).tolist()  # waits for the device
        session.memory.tokens = int(-found.pop())
        totals = dict(zip(self.sums, found, strict=False))
        tokens, kept, kept_entropy = (totals.pop(name) for name in ("tokens", "kept_tokens", "kept_entropy"))
        loss = totals.pop("loss") / session.accelerator.num_processes
        of_update = {name: totals.pop(name) for name in ("aux_loss",) if name in totals}
        extreme = zip(self.maxima, found[len(self.sums) :], strict=True)
        highest = {name: value for name, value in extreme if math.isfinite(value)}
        lowest = {name: -highest.pop(name) for name in [*highest] if name.endswith("min")}
        over = dict.fromkeys(("teacher_divergence", "privileged_gap", "teacher_kl"), totals.pop("told_tokens", tokens))
        means = {name: value / number for name, value in totals.items() if (number := over.get(name, tokens))}
        if (square := means.pop("correction_squared", None)) is not None:  # 0 if the correction leaves out every token
            mean = means["sampling/importance_sampling_ratio/mean"]
            means["sampling/effective_sample_share"] = mean**2 / square if square else 0.0
        if kept:
            means["kept_entropy"] = kept_entropy / kept
        return {"loss": loss, **of_update, **means, **highest, **lowest, "grad_norm": norm}


@torch.no_grad()
def _choice_counts(session: Session, passes: Iterable[tuple[PassInputs, MicroBatch]]) -> Tensor:
    """How often this process's passes choose each expert, over all layers. (E,)"""
    policy, counts = session.policy, list[Tensor]()
    assert policy.routers is not None
    for inputs, batch in passes:
        with policy.routing(inputs) as seen:
            policy(inputs)
        trained = batch.to(session.accelerator.device).mask.flatten()[inputs.places]
        counts.append(choice_counts(seen, inputs.tokens.predicts, trained, policy.routers.experts))
        moved()
    return torch.stack(counts).sum(0)


def _taught(session: Session, batch: MicroBatch) -> list[Taught] | None:
    """Return what the divergence of a pass over these rows, on the CPU, is computed from; None without a divergence.
    Behind prompts of its own, which are longer, a teacher reads them in passes of its own."""
    keys, found = session.config.teacher, list[Taught]()
    if keys.divergence_beta is None:
        return None
    numbers = torch.ones(len(batch.mask)) if batch.taught is None else batch.taught
    read, changes = batch.shown or batch.sequences, session.average is not None
    with teaching(session) as teachers:
        for number, teacher in enumerate(teachers, 1):
            rows = (numbers == number).nonzero().flatten()
            parts = [rows] if len(rows) or teacher.is_sharded else []
            if batch.shown is not None and len(rows):
                own = pack(read.take(rows), session.memory.limit, share_prompts=teacher.packs)
                parts = [rows[part] for part in own]
            if batch.shown is not None and teacher.is_sharded:
                parts += [rows[:0]] * (max_over_processes(len(parts)) - len(parts))
            head = None
            for part in parts:
                how = keys.divergence_beta, keys.divergence_top_k
                found.append(teacher.as_teacher(read, part, *how, changes=changes, head=head))
                head = found[-1].weight
    return found


def _forward_backward(
    session: Session,
    inputs: PassInputs,
    batch: MicroBatch,
    taught: list[Taught] | None,
    entropy_coef: float,
    tally: _Tally,
    balance: Tensor | None,
) -> None:
    """Add one pass's gradient to the accumulated one, and its figures to the tally. `taught`: what a divergence is
    computed from; `balance`: `_choice_counts` of the whole update, if its routers are balanced."""
    algorithm, mask, policy, keys = session.config.algorithm, batch.mask, session.policy, session.config.teacher
    exact = None
    if policy.dropouts:
        with torch.no_grad(), policy.routing(inputs):
            exact = policy(inputs, taught=taught)
    with policy.dropout(), policy.routing(inputs) as seen:
        found = policy(inputs, entropy_gradient=entropy_coef > 0, taught=taught)
        if exact is not None:  # values without dropout, gradients with it: what is added to the values is exactly 0
            found = tuple(value + (new - new.detach()) for value, new in zip(exact, found, strict=True))
        logprobs, entropy, *of_teacher = found
        old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        advantages = batch.advantages
        if batch.taught is not None:
            told = mask * (batch.taught > 0)[:, None]
            tally.sums["told_tokens"] += told.sum()
        else:
            told = mask
        if (teacher_logprobs := batch.teacher_logprobs) is not None:
            teacher_logprobs = torch.where(told > 0, teacher_logprobs, old_logprobs)  # else nothing to teach
            if keys.template is not None:
                tally.add("privileged_gap", teacher_logprobs - old_logprobs, told)
            advantages = teacher_advantages(advantages, old_logprobs, teacher_logprobs, keys.weight)
            tally.add("teacher_kl", old_logprobs - teacher_logprobs, told)
        losses = token_losses(
            logprobs,
            old_logprobs,
            mask,
            advantages,
            algorithm,
            sampling_logprobs=batch.sampling_logprobs,
            ref_logprobs=batch.ref_logprobs,
            keep=batch.keep,
        )
        loss = (batch.weights * losses.loss).sum()
        if of_teacher:  # at the policy as it is now, so without a ratio
            divergence, teacher_logprobs = of_teacher
            loss = loss + keys.weight * (batch.weights * divergence).sum()
            tally.add("teacher_divergence", divergence.detach(), told)
            tally.add("teacher_kl", logprobs.detach() - teacher_logprobs, told)
            if keys.template is not None:
                tally.add("privileged_gap", teacher_logprobs - logprobs.detach(), told)
        if entropy_coef > 0:
            loss = loss - entropy_coef * (batch.entropy_weights * entropy).sum()
        if balance is not None:
            aux_loss = balance_loss(seen, inputs.tokens.predicts, mask.flatten()[inputs.places], balance)
            # Gradients are averaged over the processes, and this is a sum.
            loss = loss + algorithm.router_aux_loss_coef * session.accelerator.num_processes * aux_loss
            tally.sums["aux_loss"] += aux_loss.detach()
        loss.backward()
        routing_difference = policy.routing_difference(seen, inputs)

    kept = mask if batch.keep is None else mask * batch.keep
    difference = (old_logprobs - batch.sampling_logprobs).abs()
    tally.sums["loss"] += loss.detach()
    tally.sums["tokens"] += mask.sum()
    tally.sums["kept_tokens"] += kept.sum()
    tally.add("kept_entropy", entropy.detach(), kept)
    tally.add("entropy", entropy.detach(), mask)
    if routing_difference is not None and session.plan.on_policy:  # with the weights that sampled
        tally.add("sampling/routing_difference", routing_difference, mask)
    tally.add("sampling/sampling_logp_difference/mean", difference, mask)
    tally.highest("sampling/sampling_logp_difference/max", difference, mask)
    tally.highest("log_ratio/max", (logprobs.detach() - batch.sampling_logprobs).abs(), mask)
    for name, values in losses.metrics.items():
        tally.add(name, values, mask)
    if losses.correction is not None:
        tally.add("correction_squared", losses.correction.square(), mask)
        tally.highest("sampling/importance_sampling_ratio/max", losses.correction, mask)
        tally.highest("sampling/importance_sampling_ratio/min", -losses.correction, mask)
    for name, sign in (("clip_ratio/low_mean", -1), ("clip_ratio/high_mean", 1)):
        if name in losses.metrics:
            per_completion = (losses.metrics[name] * mask).sum(1) / mask.sum(1).clamp(min=1)
            extreme = name.replace("mean", "min" if sign < 0 else "max")
            tally.highest(extreme, sign * per_completion, mask.sum(1))
