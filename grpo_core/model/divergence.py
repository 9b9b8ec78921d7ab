"""How far a policy has moved from its base: the exact KL divergence where its own completions lead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_core.config.memory_bounds import CHUNK_LOGITS
from grpo_core.distributed import gathered, max_over_processes, own_range
from grpo_core.model.capabilities import hidden_states, plain_output_layer
from grpo_core.model.images import Shown, keys, on_device, showing
from grpo_core.model.logprobs import divergence, kl_of_logs
from grpo_core.model.sequences import pad
from grpo_core.model.sharded import call_as_forward, forward, is_sharded
from grpo_core.system.progress import moved, phase

TOKENS = 8192  # of a forward pass, padding included; one sequence may be longer


@phase("divergence")
@torch.no_grad()
def mean_kl(
    policy: Any,
    base: Any,
    prompt_ids: Sequence[list[int]],
    completion_ids: Sequence[list[int]],
    masks: Sequence[list[int] | None],
) -> list[float]:
    """(1/|y|) Σ_t KL(π(·|x, y_<t) ‖ π_base(·|x, y_<t)) for each completion y of a prompt x, in nats per token. With a
    mask, the sum is over the tokens at which it is 1, and |y| their number; 0 if there is none.

    KL(p ‖ q) = Σ_v p(v) (log p(v) − log q(v)) over the whole vocabulary, at temperature 1: nothing is estimated from
    the sampled token, as k3 is. The models' passes have the dtype of their weights, logarithms and sums are float32.
    With several processes each computes its part, and all get all values.
    """
    layers = [plain_output_layer(policy), plain_output_layer(base)]
    budget = TOKENS
    if None in layers:
        layers = [None, None]
        budget = min(TOKENS, CHUNK_LOGITS // policy.config.get_text_config().vocab_size)
    lengths = [len(x) + len(y) for x, y in zip(prompt_ids, completion_ids, strict=True)]

    def kl_of_rows(rows: list[int]) -> list[float]:
        ids, shown = on_device(policy, pad([prompt_ids[row] + completion_ids[row] for row in rows], torch.int64))
        spans = [(len(prompt_ids[row]) - 1, lengths[row] - 1) for row in rows]  # each state predicts the token after it
        states = [_states(model, layer, ids, shown, spans) for model, layer in zip((policy, base), layers, strict=True)]
        if layers[0] is None or layers[1] is None:
            log_p, log_q = (logits.float().log_softmax(-1) for logits in states)
            kl = kl_of_logs(log_p, log_q)
        else:
            kl = divergence(states[0], layers[0].weight, states[1], layers[1].weight)
        parts = kl.split([stop - start for start, stop in spans])
        return [_mean(part, masks[row]) for part, row in zip(parts, rows, strict=True)]

    def compute(rows: list[int]) -> list[float]:
        moved()
        if layers[0] is None:  # the models' own forward passes
            return kl_of_rows(rows)
        return call_as_forward(policy, call_as_forward, base, kl_of_rows, rows)

    mine = own_range(len(lengths))
    batches = [[mine[row] for row in rows] for rows in _batches([lengths[row] for row in mine], budget)]
    # All processes gather a sharded model's weights for each batch.
    missing = max_over_processes(len(batches)) - len(batches) if is_sharded(policy) else 0
    found = [(row, value) for rows in batches for row, value in zip(rows, compute(rows), strict=True)]
    for _ in range(missing):
        compute([0])
    return [value for _, value in sorted(gathered(found))]


def _mean(values: Tensor, mask: list[int] | None) -> float:
    kept = values if mask is None else values[torch.tensor(mask, dtype=torch.bool, device=values.device)]
    return kept.mean().item() if len(kept) else 0.0


def _states(model: Any, layer: Any, ids: Tensor, shown: Shown | None, spans: list[tuple[int, int]]) -> Tensor:
    """Return last hidden states of the spans, or logits if the model has to make them itself. Padding is on the right,
    where a causal model does not see it."""
    with showing(model, shown):
        if layer is None:
            states = forward(model, input_ids=ids, use_cache=False, **keys(model, shown)).logits
        else:
            states = hidden_states(model, ids, shown)
    return torch.cat([row[start:stop] for row, (start, stop) in zip(states, spans, strict=True)])


def _batches(lengths: list[int], budget: int) -> Iterator[list[int]]:
    """Yield rows of like length, longest first, with at most `budget` tokens together, padding included."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    start = 0
    while start < len(order):
        count = max(1, budget // lengths[order[start]])
        yield order[start : start + count]
        start += count
