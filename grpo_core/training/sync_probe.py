"""Check that an engine has the trainer's weights: after each hand-over, both compute log-probabilities of
one probe batch.

The probe is the base model's own continuations of a few prompts: rounding changes the log-probabilities of likely
tokens least.

In bfloat16 the two differ by rounding, by more than the policy moves in an update at a usual learning rate, so a bound
on their difference alone misses stale weights. How both have changed since earlier hand-overs reveals them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_core.rollout.types import Engine, Request, Sampling

# Few and short, since both sides compute them at each sync: every weight is exercised except the embeddings of tokens
# that do not occur.
SEQUENCES = 16
TOKENS = 16  # of a prompt's end, and of its continuation
SHORTEST = 2  # tokens of a sequence: one of each
# By mixed_precision: mean |difference| between engine and trainer that is always allowed, ...
ALWAYS_ALLOWED = {"no": 1e-4, "bf16": 0.1}
# ... and the largest while both have the base's weights: more is no rounding, but another model.
LARGEST_AT_FIRST = {"no": 0.03, "bf16": 0.3}
# A later one may be this many times as large as the first. Rounding in 24 random layers changes the log-probability of
# a sampled token 1.5 times as much as that of the likeliest, and that of an arbitrary one 2 to 4 times.
MARGIN = 3.0
# Mean difference between engine and trainer over the probe that counts as rounding even where less was seen.
LEAST_ROUNDING = {"no": 1e-6, "bf16": 1e-3}  # by mixed_precision
# Share of the rounding: if the trainer's scores change by more, on the mean, an engine's cannot all stay the same.
NOTICEABLE = 0.1
GROWTH = 4.0  # times the rounding at the reference: how far the two may come apart; independent rounding makes 1.4
# By mixed_precision: share of the policy's movement that may be missing in the engine. In float32, rounding is less
# than a thousandth of what an update at a usual learning rate changes.
SHARE = {"no": 0.02, "bf16": 0.25}


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of the N continued tokens of the probe batch right after a hand-over."""

    trainer: Tensor  # (N,)
    engine: Tensor  # (C, N), one row per copy of the weights that the engine holds

    @property
    def gap(self) -> Tensor:
        """Engine minus trainer. (C, N)"""
        return self.engine - self.trainer

    @property
    def drift(self) -> float:
        """Mean |gap| of the copy that is furthest away; infinite if one of its scores is not a number."""
        return self.gap.abs().mean(1).nan_to_num(torch.inf).max().item()


@dataclass
class Probe:
    """The probe batch, what the hand-overs so far have shown, and how large the difference may be.

    Later hand-overs are compared with two earlier ones.
    """

    contexts: list[list[int]]
    continuations: list[list[int]]  # one per context
    mixed_precision: str
    own_bound: float | None = None  # rollout.max_sync_drift
    first_drift: float = 0.0  # mean |difference| while both had the base's weights
    handover: str = ""  # how the weights came to the engine last
    noticed: Scores | None = None  # the last after which the trainer's scores had changed noticeably
    reference: Scores | None = None  # the last after which a lag of SHARE would have shown

    @property
    def sequences(self) -> list[list[int]]:
        return [context + said for context, said in zip(self.contexts, self.continuations, strict=True)]

    @property
    def bound(self) -> float:
        """Largest mean |difference| between engine and trainer that a hand-over may leave."""
        return self.own_bound or max(ALWAYS_ALLOWED[self.mixed_precision], MARGIN * self.first_drift)

    @property
    def first_bound(self) -> float:
        """The same while both have the base's weights."""
        return self.own_bound or LARGEST_AT_FIRST[self.mixed_precision]

    def compare(self, now: Scores) -> tuple[float, float]:
        """Return how far the trainer has moved while a copy stayed the same bit for bit (0 if none did), and the lag.

        The lag: how far engine and trainer have come apart since the reference (its nearest copy), divided by the most
        that rounding and SHARE explain; above 1 a copy has other weights. Changes too small to tell anything add up
        until they do.
        """
        noticed, reference = self.noticed or now, self.reference or now
        moved = (now.trainer - noticed.trainer).abs()
        is_noticeable = moved.mean().item() > NOTICEABLE * self._rounding(noticed)
        # Servers may leave and come back, so that there are other copies now: each is compared with all the earlier.
        same = (now.engine[:, None] == noticed.engine).all(-1)
        stayed = is_noticeable and bool(same.any())

        allowed = GROWTH * self._rounding(reference)
        missing = SHARE[self.mixed_precision] * (now.trainer - reference.trainer).abs().mean().item()
        apart = (now.gap[:, None] - reference.gap).abs().mean(-1).min(1).values.max().item()

        self.noticed = now if is_noticeable else noticed
        self.reference = now if missing > allowed else reference
        return moved.mean().item() if stayed else 0.0, apart / max(allowed, missing)

    def _rounding(self, scores: Scores) -> float:
        return max(scores.drift, LEAST_ROUNDING[self.mixed_precision])


def probe_batch(engine: Engine, prompts: Sequence[list[int]], longest: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ends of the first prompts, and the engine's most likely continuation of each: the same in every start
    of a run, since the engine has the base's weights. `longest`: tokens of the longest sequence that it scores,
    SHORTEST or more."""
    texts = ([token for token in ids if token >= 0] for ids in prompts[:SEQUENCES])  # without images
    contexts = [ids[-min(TOKENS, longest // 2) :] for ids in texts]
    requests = [Request(ids, num_completions=1, seed=0) for ids in contexts]
    sampling = Sampling(max_tokens=min(TOKENS, longest - longest // 2))
    said = {number: answer.ids for done in engine.generate(requests, sampling) for number, (answer,) in done}
    return contexts, [said[number] for number in range(len(contexts))]
