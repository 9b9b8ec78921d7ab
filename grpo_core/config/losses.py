"""The losses that `algorithm.loss_type` may name, one row each. grpo_core/algorithm/losses.py computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from grpo_core.config.algorithm import AlgorithmConfig

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
Term = Literal["clipped", "cispo", "sapo", "vespo"]  # formulas of a token's loss: cases of `token_losses`
Normaliser = Literal[  # what a token's loss is divided by: cases of `token_weights`
    "completion", "micro-step", "max_completion_length", "generation batch", "number of completions"
]


def _cispo(keys: AlgorithmConfig) -> Iterator[str]:
    if keys.epsilon_high is None:
        yield "loss_type='cispo' takes epsilon_high as the bound of the ratio itself; set it (ScaleRL: 5.0)"


def _luspo(keys: AlgorithmConfig) -> Iterator[str]:
    if keys.importance_sampling_level != "sequence":
        yield "loss_type='luspo' is defined on sequences; set importance_sampling_level='sequence'"


def _vespo(keys: AlgorithmConfig) -> Iterator[str]:
    mode = keys.vllm_importance_sampling_mode
    if keys.importance_sampling_level != "token":
        yield "loss_type='vespo' makes its own sequence weight; use importance_sampling_level='token'"
    if keys.vllm_importance_sampling_correction and mode.startswith("sequence"):
        yield (
            f"loss_type='vespo' sums the corrections of tokens; vllm_importance_sampling_mode={mode!r} has none: "
            "use 'token_truncate' or 'token_mask'"
        )


@dataclass(frozen=True)
class Loss:
    """A loss. Code that treats losses differently asks their rows, not their names."""

    term: Term
    normaliser: Normaliser
    source: str
    """Its paper, or the library that it comes from."""
    problems: Callable[[AlgorithmConfig], Iterable[str]] = lambda keys: ()
    """Gives what it cannot take of the other keys. Only the term "clipped" takes `delta`."""


LOSSES: dict[LossType, Loss] = {
    "grpo": Loss("clipped", "completion", "arXiv:2402.03300"),
    "bnpo": Loss("clipped", "micro-step", "TRL"),
    "dr_grpo": Loss("clipped", "max_completion_length", "arXiv:2503.20783"),
    "dapo": Loss("clipped", "generation batch", "arXiv:2503.14476"),
    "cispo": Loss("cispo", "generation batch", "arXiv:2506.13585", _cispo),
    "sapo": Loss("sapo", "completion", "arXiv:2511.20347"),
    "luspo": Loss("clipped", "number of completions", "arXiv:2602.05261", _luspo),
    "vespo": Loss("vespo", "generation batch", "arXiv:2602.10693", _vespo),
}
