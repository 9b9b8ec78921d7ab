"""Whether an engine has the trainer's weights, told from what both say of the same probe batch, hand-over by hand-over.

In bfloat16 the two differ by rounding, by more than the policy moves in an update at a usual learning rate: a bound on
their difference alone does not see weights that are stale. How both have changed since earlier hand-overs does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SEQUENCES = 16  # few and short: every weight except the rows of other tokens takes part, and both sides pay each sync
TOKENS = 16
SHORTEST = 2  # tokens: the first of a sequence has no log-probability
# Mean difference between engine and trainer over the probe that counts as rounding even where less was seen.
LEAST_ROUNDING = {"no": 1e-6, "bf16": 1e-3}  # by mixed_precision
# Share of the rounding: if most of the trainer's scores change by more, an engine's cannot all stay the same.
NOTICEABLE = 0.1
GROWTH = 4.0  # times the rounding at the reference: how far the two may come apart; independent rounding makes 1.4
SHARE = 0.25  # of the policy's movement that may be missing in the engine


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of the N tokens of the probe batch right after a hand-over."""

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
    """The probe batch, and its scores after two earlier hand-overs that later ones are compared with."""

    sequences: list[list[int]]
    mixed_precision: str
    noticed: Scores | None = None  # the last after which the trainer's scores had changed noticeably
    reference: Scores | None = None  # the last after which a lag of SHARE would have shown

    def compare(self, now: Scores) -> tuple[float, float]:
        """How far the trainer has moved while a copy stayed the same bit for bit (0 if none did), and the lag.

        The lag: how far engine and trainer have come apart since the reference, divided by the most that rounding and
        SHARE explain; above 1 a copy has other weights. Changes too small to tell anything add up until they do.
        """
        noticed, reference = self.noticed or now, self.reference or now
        moved = (now.trainer - noticed.trainer).abs()
        is_noticeable = bool(moved.median() > NOTICEABLE * self._rounding(noticed))
        stayed = is_noticeable and bool((now.engine == noticed.engine).all(1).any())

        allowed = GROWTH * self._rounding(reference)
        missing = SHARE * (now.trainer - reference.trainer).abs().mean().item()
        apart = (now.gap - reference.gap).abs().mean(1).max().item()

        self.noticed = now if is_noticeable else noticed
        self.reference = now if missing > allowed else reference
        return moved.mean().item() if stayed else 0.0, apart / max(allowed, missing)

    def _rounding(self, scores: Scores) -> float:
        return max(scores.drift, LEAST_ROUNDING[self.mixed_precision])


def probe_sequences(prompts: Sequence[list[int]], eos_id: int | None, longest: int) -> list[list[int]]:
    """The ends of a few prompts, fixed for the run, each with the end token: even a prompt of one token has a score.

    Where the tokenizer has no end token, a prompt's first token comes again. `longest`: tokens of the longest sequence
    that the engine scores, SHORTEST or more.
    """
    length = min(TOKENS, longest)
    return [[*ids, ids[0] if eos_id is None else eos_id][-length:] for ids in prompts[:SEQUENCES]]
