"""Weights from trainer to engine, never on trust: after each hand-over both score the same fixed probe batch."""

from __future__ import annotations

import torch

from grpo_core.batching import Sequences
from grpo_core.data import Prompts
from grpo_core.progress import Progress
from grpo_core.rollout.collect import NotFiniteError
from grpo_core.rollout.engine import pad
from grpo_core.session import SHORTEST_PROBE, Session, TrainingError

PROBE_SEQUENCES = 4  # few and short: every weight but the rows of other tokens takes part, and both sides pay each sync
PROBE_TOKENS = 16
DRIFT_BOUND = {"no": 1e-3, "bf16": 0.1}  # by mixed_precision; vLLM on a million parameters stays below 2e-6 and 0.022


def sync(session: Session, progress: Progress) -> float:
    """Hand the policy's weights to the engine; the mean |difference| of both sides' log-probabilities of the probe.

    TrainingError on every process when it is beyond the bound on one: the engine would sample from another policy than
    the one that is trained, and nothing else would say so.
    """
    session.policy.refresh()
    session.engine.sync_weights(session.policy.model)
    longest = session.prompts.max_length + session.config.rollout.max_completion_length - 1  # that vLLM scores
    length = min(PROBE_TOKENS, max(SHORTEST_PROBE, longest))
    sequences = probe_sequences(session.prompts, session.tokenizer.eos_token_id, length)
    trainer = torch.cat([row[: len(ids) - 1] for row, ids in zip(_score(session, sequences), sequences, strict=True)])
    if not trainer.isfinite().all():
        raise NotFiniteError(f"after step {progress.updates}: the policy's log-probabilities are not finite")
    engine = torch.tensor([value for row in session.engine.score(sequences) for value in row])
    copies = engine.view(-1, len(trainer))  # of the weights, in engines of their own
    local = (copies - trainer).abs().mean(1).nan_to_num(torch.inf).max()
    drift = session.accelerator.gather(local.to(session.accelerator.device)).max().item()
    bound = session.config.rollout.max_sync_drift or DRIFT_BOUND[session.config.train.mixed_precision]
    if drift > bound:
        raise TrainingError(
            f"after step {progress.updates}: the engine's log-probabilities of the probe batch are {drift:.3g} away "
            f"from the trainer's, the bound is {bound:g} (rollout.max_sync_drift): the engine does not have the "
            "trainer's weights, or computes in another precision. The last checkpoint is intact; try rollout.engine = "
            "'transformers' to see whether the engine is the cause"
        )
    return drift


def probe_sequences(prompts: Prompts, eos_id: int | None, length: int) -> list[list[int]]:
    """The ends of a few prompts, fixed for the run, each with the end token: even a prompt of one token has a score.

    Where the tokenizer has no end token, a prompt's first token comes again.
    """
    return [[*ids, ids[0] if eos_id is None else eos_id][-length:] for ids in prompts.ids[:PROBE_SEQUENCES]]


@torch.no_grad()
def _score(session: Session, sequences: list[list[int]]) -> torch.Tensor:
    """The trainer's log-probability of each token but the first, at temperature 1. (B, L - 1) on the CPU"""
    ids, firsts = pad(sequences, torch.int64), torch.ones(len(sequences), dtype=torch.int64)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    batch = Sequences(ids, firsts, lengths - 1)
    logprobs, _ = session.policy.at(1.0)(batch)
    return logprobs.cpu()
