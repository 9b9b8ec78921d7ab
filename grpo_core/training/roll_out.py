"""One generation batch as updates read it: sampled by the current policy, scored, with log-probabilities; and the
epochs that a curriculum arranges as pass rates become known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_core.algorithm.losses import top_entropy_mask
from grpo_core.config.teacher import source_teachers
from grpo_core.data.curriculum import arrange, describe, distance, known_batches
from grpo_core.data.order import Group, Schedule, epoch_rows
from grpo_core.distributed import failing_together, max_over_processes, rows_of_processes
from grpo_core.errors import EngineError
from grpo_core.model.logprobs import Floor
from grpo_core.model.policy import PassInputs, Policy
from grpo_core.model.sequences import pad
from grpo_core.planning.sampling_ahead import batches_ahead
from grpo_core.planning.sampling_notes import truncating_keys
from grpo_core.rewards.trl_arguments import TrainerState
from grpo_core.rollout.ahead import Ahead
from grpo_core.rollout.collect import BatchRequest, Sample, collect, sources_of
from grpo_core.rollout.privileged import shown_prompts
from grpo_core.rollout.records import demonstrated, replay
from grpo_core.rollout.types import GenerationBatch, Rollout
from grpo_core.rollout.waiting import TEACHER
from grpo_core.system.progress import moved, phase
from grpo_core.system.to_device import move
from grpo_core.training.batch import balance_rows, has_gradient, join
from grpo_core.training.session import Sampler, Session, holding, teaching
from grpo_core.training.state import TrainingState
from grpo_core.training.weight_sync import sync_weights


def roll_out(session: Session, index: int, state: TrainingState) -> tuple[Rollout, list[Sample], list[Group]]:
    """Make generation batch `index`: sync weights, sample, score, advantages, log-probabilities (the old ones, the
    reference's and the teacher's). Also returns the samples and the groups left for later batches. On a recording, the
    batch is replayed; that of a warm start has demonstrations, and no samples."""
    if session.demonstrations is not None:
        schedule = Schedule(session.plan, session.config.seed)
        batch, samples, left = demonstrated(index, session.demonstrations.rows, schedule), list[Sample](), list[Group]()
    elif session.sampler is None:
        session.policy.refresh()
        batch, samples, left = *replay(index, session.config, session.plan), list[Group]()
    else:
        batch, samples, left = _sample(session, session.sampler, index, state)
    shown, taught = _shown(session, batch, samples)
    old_logprobs, keep, difference = _old_logprobs(session, batch, taught)
    logprobs: dict[str, Any] = {"old_logprobs": old_logprobs, "ref_logprobs": _ref_logprobs(session, batch)}
    if session.config.teacher.is_used and not session.config.teacher.diverges:  # else in each update
        logprobs["teacher_logprobs"] = _teacher_logprobs(session, replace(batch, prompt_ids=shown), samples, taught)
    if taught is not None:
        batch = replace(batch, metrics={**batch.metrics, "teacher_shown": (taught > 0).float().mean().item()})
    if not session.plan.on_policy:
        read = session.config.algorithm.routing_replay  # else they have been compared
        batch = replace(batch, metrics=batch.metrics | difference, routes=batch.routes if read else None)
    if session.sampler is not None and index == 0 and (floor := session.policy.floor):
        outside = _outside(session, batch, floor, truncating_keys(session.config))
        batch = replace(batch, metrics=batch.metrics | outside)
    read = shown if session.privileged and session.config.teacher.diverges else None
    return Rollout(**vars(batch), **logprobs, keep=keep, taught=taught, shown=read), samples, left


def _sample(
    session: Session, sampler: Sampler, index: int, state: TrainingState
) -> tuple[GenerationBatch, list[Sample], list[Group]]:
    """Sample generation batch `index` from the current policy."""
    s, drift = session, sync_weights(session, sampler, state)
    is_new = index == state.rollouts  # else it is sampled again after a roll-back
    groups: Ahead | Sequence[Group] = ()
    if sampler.lookahead is not None:
        groups = Ahead(sampler.lookahead, state.begun, state.max_staleness) if is_new else state.taken
    scoring = replace(s.scoring, state=TrainerState.after(state.updates, s.plan))
    schedule = Schedule(s.plan, s.config.seed, state.arranged)
    batch, samples, left = collect(
        BatchRequest(index, schedule, s.config, s.prompts, scoring, sampler.engine, state.roll_backs), groups
    )
    metrics = {**batch.metrics, "sampling/sync_drift": drift, **_curriculum_metrics(session, state, index)}
    if sampler.lookahead is not None:
        metrics["sampling/max_staleness"] = float(state.max_staleness)
    batch = replace(batch, metrics=metrics)
    return batch, samples, left if is_new else state.begun


@phase("old log-probabilities")
def _old_logprobs(
    session: Session, batch: GenerationBatch, taught: Tensor | None
) -> tuple[Tensor | None, Tensor | None, dict[str, float]]:
    """Return the policy's log-probabilities before the first update, and the mask of the tokens of highest entropy,
    (B, T) each, None if no update reads them; and the metric of how far the engine's routing differs from the policy's.
    """
    plan, algorithm = session.plan, session.config.algorithm
    in_loss = batch.completion_mask.sum(1) > 0
    if algorithm.top_entropy_quantile < 1:
        logprobs, entropy, difference = _routed_logprobs(session, batch, in_loss)
        keep = top_entropy_mask(entropy, batch.completion_mask, algorithm.top_entropy_quantile)
        return None if plan.on_policy else logprobs, keep, difference
    if plan.on_policy:
        return None, None, {}
    read = has_gradient(session.config, batch.advantages, batch.completion_mask, taught)
    logprobs, _, difference = _routed_logprobs(session, batch, read)
    return logprobs, None, difference


def _routed_logprobs(
    session: Session, batch: GenerationBatch, needed: Tensor
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Do as `compute_logprobs` with the policy, whose passes take the engine's experts if the training replays them.
    Also returns the metric of how far the engine's routing differs; empty if it is not known."""
    policy = session.policy

    def compute(inputs: PassInputs) -> Tensor:
        with policy.routing(inputs) as seen:
            figures = [*policy(inputs)]
            difference = policy.routing_difference(seen, inputs)
        return torch.stack(figures if difference is None else [*figures, difference])

    known = policy.routers is not None and batch.routes is not None
    logprobs, entropy, *differences = _computed(session, policy, batch, needed, compute, 2 + known)
    tokens = (batch.completion_mask * needed[:, None]).sum().clamp(min=1)
    shares = [((each * batch.completion_mask).sum() / tokens).item() for each in differences]
    return logprobs, entropy, dict(zip(["sampling/routing_difference"], shares, strict=False))


@phase("reference log-probabilities")
def _ref_logprobs(session: Session, batch: GenerationBatch) -> Tensor | None:
    """Return the reference policy's log-probabilities, (B, T), over the whole vocabulary; None without KL. The KL of a
    policy that leaves tokens out from one that does not is finite; from one that leaves out others it would not be."""
    in_loss = batch.completion_mask.sum(1) > 0
    if session.reference is not None:
        return compute_logprobs(session, session.reference, batch, in_loss)[0]
    if session.config.algorithm.beta > 0:
        # The base alone, or under the adapter that the training started from.
        with session.policy.model.disable_adapter() if session.start is None else holding(session, session.start):
            whole = session.policy.whole(session.policy.temperature)
            return compute_logprobs(session, whole, batch, in_loss)[0]
    return None


def _shown(
    session: Session, batch: GenerationBatch, samples: Sequence[Sample]
) -> tuple[list[list[int]], Tensor | None]:
    """Return the prompts that the teacher reads, and the number of each completion's teacher, see `Rollout`."""
    if names := source_teachers(session.config):
        numbers = {"": 0.0} | {name: float(number) for number, name in enumerate(session.teachers, 1)}
        by = torch.tensor([numbers[names[source or ""]] for source in sources_of(samples, session.plan)])
        return batch.prompt_ids, by
    if session.privileged is None:
        return batch.prompt_ids, None
    shown = shown_prompts(session.privileged, samples, session.prompts.rows)
    taught = torch.tensor([float(ids is not None) for ids in shown])
    return [ids or own for ids, own in zip(shown, batch.prompt_ids, strict=True)], taught


@phase(TEACHER)
def _teacher_logprobs(
    session: Session, batch: GenerationBatch, samples: Sequence[Sample], taught: Tensor | None
) -> Tensor:
    """Return the log-probabilities, (B, T), over the whole vocabulary, that each completion's teacher gives it behind
    the batch's prompts; 0 for those that none teaches. A policy that teaches itself is as before the batch's first
    update, or the average of its weights."""
    batch, needed = replace(batch, routes=None), batch.completion_mask.sum(1) > 0
    found = torch.zeros(batch.completion_ids.shape)
    if taught is None:
        taught = torch.ones(len(needed))
        found = pad([sample.taught or [0.0] * len(sample.completion.ids) for sample in samples], torch.float32)
        found *= needed[:, None]
        needed = needed & ~found.any(1)  # a recording has 0 where no teacher was asked
    if session.config.teacher.url is not None:
        needed = needed & (taught > 0)
        return found + _served_logprobs(session, batch, needed) if needed.any() else found
    with teaching(session) as teachers:
        for number, teacher in enumerate(teachers, 1):
            own = needed & (taught == number)
            if own.any():
                found += compute_logprobs(session, teacher, batch, own)[0]
    return found


def _served_logprobs(session: Session, batch: GenerationBatch, needed: Tensor) -> Tensor:
    """Return the log-probabilities of a teacher behind a server, (B, T), 0 for completions that are not `needed`. Each
    process asks for its part, and all get the whole. Raises EngineError on every process if one gets no answer."""
    from grpo_core.rollout.served_teacher import served_logprobs  # imports httpx2

    accelerator = session.accelerator
    mine = needed.nonzero().flatten().tolist()[accelerator.process_index :: accelerator.num_processes]
    completions = [batch.completion_ids[row, : batch.completion_lengths[row]].tolist() for row in mine]
    asked = [(batch.prompt_ids[row], completion) for row, completion in zip(mine, completions, strict=True)]
    rows, width = batch.completion_ids.shape
    found = torch.zeros(len(mine), width)
    with failing_together(kind=EngineError):
        for own, logprobs in enumerate(served_logprobs(session.config, asked)):
            found[own, : len(logprobs)] = torch.tensor(logprobs)
            moved()
    return rows_of_processes(found.to(accelerator.device), mine, rows)


@phase("what sampling leaves out")
def _outside(session: Session, batch: GenerationBatch, floor: Floor, keys: str) -> dict[str, float]:
    """Return the share of the trained tokens that the policy, with the weights that sampled, would leave out, and print
    it: rounding at the edge of the set, if engine and trainer decide alike. A repetition penalty is left out."""

    def are_outside(logits: Tensor, targets: Tensor) -> Tensor:
        return (logits.gather(1, targets[:, None]).squeeze(1) < floor(logits)).float()

    def outside(inputs: PassInputs) -> Tensor:
        with session.policy.routing(inputs):
            return session.policy.over_logits(inputs, are_outside)[None]

    mask = batch.completion_mask
    (found,) = _computed(session, session.policy, batch, mask.sum(1) > 0, outside, 1)
    share = (found * mask).sum().item() / max(mask.sum().item(), 1)
    if session.accelerator.is_main_process:
        print(
            f"training: with {keys}, the trainer would leave out {share:.2%} of the tokens that were sampled first",
            flush=True,
        )
    return {"sampling/outside_share": share}


def compute_logprobs(session: Session, policy: Policy, batch: GenerationBatch, needed: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of the completions `needed` (B,), 0 for the others. 2 × (B, T) on the CPU

    Each process computes its part, and all get the whole.
    """
    logprobs, entropy = _computed(session, policy, batch, needed, lambda inputs: torch.stack(policy(inputs)), 2)
    return logprobs, entropy


@torch.no_grad()
def _computed(
    session: Session,
    policy: Policy,
    batch: GenerationBatch,
    needed: Tensor,
    compute: Callable[[PassInputs], Tensor],
    figures: int,
) -> Tensor:
    """Return the `figures` that a pass computes of each token of the completions `needed` (B,), 0 for the others.
    (figures, B, T) on the CPU"""
    accelerator, device = session.accelerator, session.accelerator.device
    count, width = batch.completion_ids.shape
    sequences, rows = join(batch, [*range(len(batch.prompt_ids))]), needed.nonzero().flatten()
    parts = balance_rows(sequences, rows, accelerator.num_processes, share_prompts=session.policy.packs)
    mine = parts[accelerator.process_index]
    found = torch.zeros(figures, len(mine), width, device=device)

    def work(parts: list[Tensor]) -> None:
        # All processes gather a sharded model's weights for each pass.
        missing = max_over_processes(len(parts)) - len(parts) if policy.is_sharded else 0
        for part in parts:  # the CPU prepares each while the device works on the one before
            inputs, (places,) = policy.prepare(own.take(part)), move([part], device)
            found[:, places, : inputs.shape[1]] = compute(inputs)
            moved()
        if missing:
            idle = policy.prepare(sequences.take(sequences.lengths.argmin()[None]))
            for _ in range(missing):
                compute(idle)

    if len(mine):
        own = sequences.take(mine)
        session.memory.run(own, work, share_prompts=policy.packs)
    else:
        work([])
    return rows_of_processes(found, mine.tolist(), count)


def arrange_epochs(session: Session, state: TrainingState) -> TrainingState:
    """Arrange the epochs whose rates are now known, see `known_batches`, and drop those that are over.

    Epochs in the state are not arranged again: a training that was rolled back or resumed takes the same prompts.
    """
    if state.arranged is None:
        return state
    keys, seed, plan, rates = session.config.data.curriculum, session.config.seed, session.plan, state.rates
    assert rates is not None
    newest = max(state.rollouts - 1, 0) // plan.rollouts_per_epoch  # its last batch may be sampled again
    arranged = {epoch: rows for epoch, rows in state.arranged.items() if epoch >= newest}
    epoch, last = max(state.arranged, default=-1) + 1, (plan.rollouts - 1) // plan.rollouts_per_epoch
    ahead = batches_ahead(session.config.rollout.max_staleness)
    while epoch <= last and known_batches(plan, epoch, ahead) <= state.rollouts:
        arranged[epoch] = arrange(epoch_rows(plan, seed, epoch), rates, keys, plan, seed, epoch)
        if session.accelerator.is_main_process:
            print(f"training: epoch {epoch + 1} takes {describe(rates, arranged[epoch], keys, plan)}", flush=True)
        epoch += 1
    return replace(state, arranged=arranged)


def _curriculum_metrics(session: Session, state: TrainingState, index: int) -> dict[str, float]:
    """Metrics of a curriculum when generation batch `index` is sampled; empty without one."""
    if state.arranged is None or state.rates is None:
        return {}
    keys, rates = session.config.data.curriculum, state.rates
    taken = np.unique(state.arranged[index // session.plan.rollouts_per_epoch])
    found = {"curriculum/taken": len(taken) / len(rates.passed), "curriculum/known": rates.known.mean().item()}
    if rates.known.any():
        found["curriculum/pass_rate"] = np.nanmean(rates.rate).item()
        if keys.kind == "band":
            found["curriculum/in_band"] = (distance(rates, keys)[rates.known] == 0).mean().item()
    return found
