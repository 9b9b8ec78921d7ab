"""One optimizer update: forward and backward over its micro-batches, one gradient over all processes, one step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from grpo_core.algorithm.losses import token_losses
from grpo_core.config.algorithm import AlgorithmConfig
from grpo_core.model.policy import Policy
from grpo_core.model.sequences import pack
from grpo_core.rollout.collect import NotFiniteError, share
from grpo_core.rollout.types import Rollout
from grpo_core.training.batch import MicroBatch, join, take, trained
from grpo_core.training.interrupt import commit
from grpo_core.training.session import Session
from grpo_core.training.state import Progress

BUCKET = 2**26  # gradient elements reduced at once: few calls, little memory
CPU_TOKENS = 2048  # of a pass on a CPU; with more, what a layer makes no longer stays in the cache for the next


def update(session: Session, batch: MicroBatch, progress: Progress) -> dict[str, float]:
    """Accumulate the gradient of this process's rows, average it over the processes, step; global metrics.

    Figures of tokens are means over those that are trained: without KL and entropy bonus, of completions with an
    advantage. An adaptive entropy bonus measures the entropy of all completions, also while it rests. NotFiniteError
    when loss or gradient is not a number, before the step is taken, or a weight after it.
    """
    config, accelerator, optimizer = session.config, session.accelerator, session.optimizer
    entropy_coef = applied_entropy_coef(config.algorithm, progress)
    session.policy.refresh()

    longest = int(batch.sequences.lengths.max())
    if batch.ref_logprobs is None and not config.algorithm.has_entropy_bonus:
        batch = trained(batch)

    def accumulate(rows: int) -> _Tally:
        session.policy.zero_grad()  # of both copies: memory may have run out between the two
        tally = _Tally(accelerator.device)
        tokens = _tokens(rows * longest, accelerator.device)
        for part in pack(batch.sequences, tokens, share_prompts=session.policy.packs):
            _forward_backward(session, take(batch, part).to(accelerator.device), entropy_coef, tally)
        return tally

    tally = session.memory.run(accumulate)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    _average_gradients(parameters, accelerator.num_processes)
    grad_norm = torch.nn.utils.clip_grad_norm_(parameters, config.train.max_grad_norm).item()
    metrics = tally.over_all_processes(session)
    if not (math.isfinite(metrics["loss"]) and math.isfinite(grad_norm)):
        optimizer.zero_grad()
        raise NotFiniteError(f"step {progress.updates + 1}: loss {metrics['loss']}, gradient norm {grad_norm}")
    commit()
    learning_rate = session.learning_rate(progress.updates) * 0.5**progress.roll_backs
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad()
    if not torch.stack([parameter.isfinite().all() for parameter in parameters]).all():
        raise NotFiniteError(f"step {progress.updates + 1}: the weights after the update are not finite")
    if config.algorithm.has_entropy_bonus:
        metrics["entropy_coef"] = entropy_coef
    return {**metrics, "grad_norm": grad_norm, "learning_rate": learning_rate}


@torch.no_grad()
def score(session: Session, policy: Policy, rollout: Rollout, needed: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the completions `needed` (B,), 0 of the others. 2 × (B, T) on the CPU

    Each process computes its share of them and gets all.
    """
    accelerator = session.accelerator
    rows = needed.nonzero().flatten()
    mine = rows[share(len(rows), accelerator)]
    scored = torch.zeros(2, *rollout.completion_ids.shape, device=accelerator.device)

    def work(rows_per_pass: int) -> None:
        everything = join(rollout, mine.tolist())
        tokens = _tokens(rows_per_pass * int(everything.lengths.max()), accelerator.device)
        for part in pack(everything, tokens, share_prompts=policy.packs):
            values = torch.stack(policy(everything.take(part)))
            scored[:, mine[part], : values.shape[2]] = values

    if len(mine):
        session.memory.run(work)
    logprobs, entropy = accelerator.reduce(scored, "sum").cpu()  # each row is 0 on all processes but one
    return logprobs, entropy


def applied_entropy_coef(config: AlgorithmConfig, progress: Progress) -> float:
    """Weight of the entropy bonus in the next update; adaptive, it rests while entropy is above the target."""
    if config.use_adaptive_entropy:
        return progress.entropy_coef if progress.last_entropy <= config.entropy_target else 0.0
    return config.entropy_coef


def adapt_entropy(config: AlgorithmConfig, progress: Progress, entropy: float) -> Progress:
    """Skywork-OR1 (arXiv:2505.22312): a step up while entropy is at or below its target, else a step down."""
    step = config.entropy_coef_delta if entropy <= config.entropy_target else -config.entropy_coef_delta
    coef = min(max(progress.entropy_coef + step, config.entropy_coef_min), config.entropy_coef_max)
    return replace(progress, entropy_coef=coef, last_entropy=entropy)


def _tokens(budget: int, device: torch.device) -> int:
    """Of one pass."""
    return min(budget, CPU_TOKENS) if device.type == "cpu" else budget


class _Tally:
    """Sums and extremes over the micro-batches, left on the device until the update is done."""

    def __init__(self, device: torch.device):
        self.sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=device))
        self.maxima: dict[str, Tensor] = defaultdict(lambda: torch.full((), -torch.inf, device=device))

    def add(self, name: str, values: Tensor, mask: Tensor) -> None:
        self.sums[name] += (values * mask).sum()

    def highest(self, name: str, values: Tensor, mask: Tensor) -> None:
        found = torch.where(mask > 0, values, -torch.inf).max()
        self.maxima[name] = torch.maximum(self.maxima[name], found)

    def over_all_processes(self, session: Session) -> dict[str, float]:
        """Means over tokens, where there are any, extremes, and the loss; the same on every process."""
        accelerator = session.accelerator
        sums = accelerator.reduce(torch.stack([*self.sums.values()]), "sum").tolist()
        totals = dict(zip(self.sums, sums, strict=True))
        rows = torch.tensor(float(session.memory.rows), device=accelerator.device)
        extremes = accelerator.gather(torch.stack([*self.maxima.values(), -rows])[None]).max(dim=0).values.tolist()
        session.memory.rows = int(-extremes.pop())  # what fits everywhere
        tokens, kept, kept_entropy = (totals.pop(name) for name in ("tokens", "kept_tokens", "kept_entropy"))
        loss = totals.pop("loss") / accelerator.num_processes
        highest = {name: value for name, value in zip(self.maxima, extremes, strict=True) if math.isfinite(value)}
        lowest = {name: -highest.pop(name) for name in [*highest] if name.endswith("min")}
        means = {name: total / tokens for name, total in totals.items()} if tokens else {}
        if kept:
            means["kept_entropy"] = kept_entropy / kept
        return {"loss": loss, **means, **highest, **lowest}


def _forward_backward(session: Session, batch: MicroBatch, entropy_coef: float, tally: _Tally) -> None:
    """Add one part's gradient to what is accumulated, and its figures to the tally."""
    algorithm, mask = session.config.algorithm, batch.mask
    logprobs, entropy = session.policy(batch.sequences, entropy_gradient=entropy_coef > 0)
    old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    losses = token_losses(
        logprobs,
        old_logprobs,
        mask,
        batch.advantages,
        algorithm,
        sampling_logprobs=batch.sampling_logprobs,
        ref_logprobs=batch.ref_logprobs,
        keep=batch.keep,
    )
    loss = (batch.weights * losses.loss).sum()
    if entropy_coef > 0:
        loss = loss - entropy_coef * (batch.entropy_weights * entropy).sum()
    loss.backward()

    kept = mask if batch.keep is None else mask * batch.keep
    difference = (old_logprobs - batch.sampling_logprobs).abs()
    tally.sums["loss"] += loss.detach()
    tally.sums["tokens"] += mask.sum()
    tally.sums["kept_tokens"] += kept.sum()
    tally.add("kept_entropy", entropy.detach(), kept)
    tally.add("entropy", entropy.detach(), mask)
    tally.add("sampling/sampling_logp_difference/mean", difference, mask)
    tally.highest("sampling/sampling_logp_difference/max", difference, mask)
    tally.highest("log_ratio/max", (logprobs.detach() - batch.sampling_logprobs).abs(), mask)
    for name, values in losses.metrics.items():
        tally.add(name, values, mask)
    if losses.correction is not None:
        tally.highest("sampling/importance_sampling_ratio/max", losses.correction, mask)
        tally.highest("sampling/importance_sampling_ratio/min", -losses.correction, mask)
    for name, sign in (("clip_ratio/low_mean", -1), ("clip_ratio/high_mean", 1)):
        if name in losses.metrics:
            per_completion = (losses.metrics[name] * mask).sum(1) / mask.sum(1).clamp(min=1)
            extreme = name.replace("mean", "min" if sign < 0 else "max")
            tally.highest(extreme, sign * per_completion, mask.sum(1))


@torch.no_grad()
def _average_gradients(parameters: Sequence[Tensor], num_processes: int) -> None:
    """Mean of each gradient over the processes, in few large messages.

    A parameter that has no gradient on any process gets none, as with one process: the optimizer leaves it alone.
    """
    if num_processes == 1:
        return
    used = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
    torch.distributed.all_reduce(used)
    trained = [parameter for parameter, count in zip(parameters, used.tolist(), strict=True) if count]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    bucket: list[Tensor] = []
    for position, gradient in enumerate(gradients):
        bucket.append(gradient)
        if sum(g.numel() for g in bucket) >= BUCKET or position == len(gradients) - 1:
            flat = torch.cat([g.flatten() for g in bucket]) / num_processes
            torch.distributed.all_reduce(flat)
            for g, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                g.copy_(mean.view_as(g))
            bucket = []
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.grad = gradient
