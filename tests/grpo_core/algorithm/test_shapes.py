"""Annotated shapes hold: a wrong one is an error in the tests, whatever broadcasting would have made of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from jaxtyping import TypeCheckError

from grpo_core.algorithm.advantages import Advantages, group_advantages, sample_std, teacher_advantages
from grpo_core.algorithm.losses import TokenLosses, clipped_loss, kl_to_reference, token_losses, token_weights
from grpo_core.config.algorithm import AlgorithmConfig
from grpo_core.model.logprobs import chosen_logprobs, divergence, float32_product
from grpo_core.model.policy import _logprobs_and_entropy
from grpo_core.model.sequences import Sequences
from grpo_core.training.batch import MicroBatch
from tests.conftest import SHAPED

B, T, K, N, V, H = 4, 3, 2, 5, 7, 6
PER_TOKEN, PER_COMPLETION = torch.zeros(B, T), torch.zeros(B)
COLUMN = torch.zeros(B, 1)
TOKENS = torch.zeros(N, dtype=torch.int64)
SEQUENCES = Sequences(torch.zeros(B, 9, dtype=torch.int64), torch.full((B,), 6), torch.full((B,), T), torch.arange(B))
BATCH = MicroBatch(SEQUENCES, PER_TOKEN, PER_TOKEN, PER_COMPLETION, PER_TOKEN, None, None, None, PER_TOKEN)


def weights(mask: torch.Tensor) -> torch.Tensor:
    return token_weights(
        "completion",
        mask,
        micro_steps=1,
        rollout_tokens=1,
        steps_per_generation=1,
        num_processes=1,
        max_completion_length=T,
    )


def test_right_shapes_pass() -> None:
    token_losses(PER_TOKEN, PER_TOKEN, PER_TOKEN, PER_COMPLETION, AlgorithmConfig(), ref_logprobs=PER_TOKEN)
    token_losses(PER_TOKEN, PER_TOKEN, PER_TOKEN, PER_TOKEN, AlgorithmConfig())
    clipped_loss(COLUMN, COLUMN, 0.2, 0.2)
    clipped_loss(COLUMN, PER_TOKEN, 0.2, 0.2)
    clipped_loss(PER_TOKEN, COLUMN, 0.2, 0.2)
    weights(PER_TOKEN)
    group_advantages(torch.zeros(B, K), torch.ones(K), 2)
    chosen_logprobs(torch.zeros(N, H), torch.zeros(V, H), TOKENS, 1.0)
    divergence(torch.zeros(N, H), torch.zeros(V, H), torch.zeros(N, 2), torch.zeros(V, 2))
    _logprobs_and_entropy(torch.zeros(N, V), TOKENS)
    replace(BATCH, keep=PER_TOKEN)


# Each of these would be broadcast, or taken for something else, without a word.
WRONG: dict[str, Callable[[], object]] = {
    "advantages of one completion for all": lambda: token_losses(
        PER_TOKEN, PER_TOKEN, PER_TOKEN, torch.zeros(1), AlgorithmConfig()
    ),
    "advantages of one token for all": lambda: token_losses(PER_TOKEN, PER_TOKEN, PER_TOKEN, COLUMN, AlgorithmConfig()),
    "a teacher of one token for all": lambda: teacher_advantages(PER_COMPLETION, PER_TOKEN, COLUMN, 1.0),
    "log-probabilities of one row for all": lambda: token_losses(
        PER_TOKEN, PER_TOKEN[:1], PER_TOKEN, PER_COMPLETION, AlgorithmConfig()
    ),
    "a reference's log-probabilities of one token for all": lambda: kl_to_reference(PER_TOKEN, COLUMN, PER_TOKEN, None),
    "a ratio per completion without the dimension of tokens": lambda: clipped_loss(PER_COMPLETION, COLUMN, 0.2, 0.2),
    "an advantage in a row": lambda: clipped_loss(torch.zeros(3, 3), torch.zeros(1, 3), 0.2, 0.2),
    "a mask of integers": lambda: weights(PER_TOKEN.long()),
    "a mask per completion": lambda: weights(PER_COMPLETION),
    "a loss of another width than its correction": lambda: TokenLosses(PER_TOKEN, {}, COLUMN),
    "a weight too few": lambda: group_advantages(torch.zeros(B, K), torch.ones(1), 2),
    "sizes of one group for all": lambda: sample_std(torch.zeros(2, B), torch.zeros(1, B)),
    "rewards per function": lambda: Advantages(PER_COMPLETION, torch.zeros(B, K), torch.zeros(2)),
    "a target for all tokens": lambda: chosen_logprobs(torch.zeros(N, H), torch.zeros(V, H), TOKENS[:1], 1.0),
    "targets that are no indices": lambda: chosen_logprobs(torch.zeros(N, H), torch.zeros(V, H), TOKENS.float(), 1.0),
    "two vocabularies": lambda: divergence(torch.zeros(N, H), torch.zeros(V, H), torch.zeros(N, 2), torch.zeros(1, 2)),
    "logits in half precision": lambda: _logprobs_and_entropy(torch.zeros(N, V, dtype=torch.bfloat16), TOKENS),
    "lengths of fewer completions": lambda: replace(SEQUENCES, prompt_lengths=torch.zeros(1, dtype=torch.int64)),
    "a batch's weights of another width": lambda: replace(BATCH, weights=COLUMN),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_a_wrong_shape_is_an_error(call: Callable[[], object]) -> None:
    with pytest.raises(TypeCheckError):
        call()


def test_every_shaped_module_is_checked() -> None:
    """A module that is renamed must be renamed in the list too."""
    checked = {
        call.__module__
        for call in (
            token_losses,
            sample_std,
            float32_product,
            chosen_logprobs,
            _logprobs_and_entropy,
            Sequences,
            MicroBatch,
        )
    }
    assert checked == set(SHAPED)


@pytest.mark.slow
def test_outside_of_tests_nothing_is_checked() -> None:
    code = (
        "import sys, torch\n"
        "from grpo_core.algorithm.losses import clipped_loss\n"
        "assert 'beartype' not in sys.modules\n"
        "print(clipped_loss(torch.zeros(3, 3), torch.zeros(1, 3), 0.2, 0.2).shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "torch.Size([3, 3])\n"
