"""Sampling with the training model itself: nothing to install, nothing to synchronise; the default on a CPU.

Each completion draws from its own stream of uniforms, so its tokens depend on its seed alone and not on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from grpo_core.limits import MAX_ROWS
from grpo_core.rollout.engine import Completion, Request, Sampling

STILL_GOING = 0.75  # share of the batch; below it, finished completions leave, which costs a copy of the cache
BLOCK = 128  # tokens


class TransformersEngine:
    """Satisfies `engine.Engine` with a decoding loop over a Hugging Face causal LM."""

    def __init__(self, model: nn.Module, tokenizer: Any, *, bf16: bool = False):
        self.model: Any = model
        self.bf16 = bf16
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        # Both, as in vLLM: a chat model often ends its turns with another token than its tokenizer names.
        named = getattr(model.generation_config, "eos_token_id", None)
        named = named if isinstance(named, list) else [named]
        self.end_ids = torch.tensor([end for end in {*named, tokenizer.eos_token_id} if end is not None])

    def sync_weights(self, model: nn.Module) -> None:
        self.model = model

    def close(self) -> None:
        pass

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        if not requests:
            return []
        device = next(self.model.parameters()).device
        completions: list[Completion] = []
        with self._autocast(device):
            for chunk in _chunks(requests, MAX_ROWS):
                completions += self._generate(chunk, sampling, device)
        return completions

    @torch.no_grad()
    def score(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        device = next(self.model.parameters()).device
        width = max(len(ids) for ids in sequences)
        input_ids = torch.tensor([ids + [self.pad_id] * (width - len(ids)) for ids in sequences], device=device)
        with self._autocast(device):
            # Padded on the right, where a causal model's other positions do not see it: no mask.
            logits = self.model(input_ids=input_ids, use_cache=False).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(2, input_ids[:, 1:, None]).squeeze(2).tolist()
        return [row[: len(ids) - 1] for row, ids in zip(logprobs, sequences, strict=True)]

    def _autocast(self, device: torch.device) -> torch.autocast:
        """The precision that the trainer scores the same tokens in."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.bf16)

    def _generate(self, requests: Sequence[Request], sampling: Sampling, device: torch.device) -> list[Completion]:
        end_ids = self.end_ids.to(device)
        width = max(len(request.prompt_ids) for request in requests)
        padding = [width - len(request.prompt_ids) for request in requests]
        ids = [[self.pad_id] * n + request.prompt_ids for n, request in zip(padding, requests, strict=True)]
        mask = torch.tensor([[0] * n + [1] * (width - n) for n in padding], device=device)  # (R, width)
        input_ids = torch.tensor(ids, device=device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache()
        # Each prompt is computed once; its completions then share the result.
        logits = self._step(input_ids, mask, positions, cache)
        copies = torch.tensor([request.num_completions for request in requests], device=device)
        rows = torch.arange(len(requests), device=device).repeat_interleave(copies)  # (B,)
        cache.batch_select_indices(rows)
        logits, mask, position = logits[rows], mask[rows], positions[rows, -1]
        uniforms = _uniforms(requests, sampling.max_tokens).to(device)  # (B, T)
        tokens = torch.zeros(uniforms.shape, dtype=torch.int64, device=device)
        logprobs, lengths = torch.zeros_like(uniforms), torch.zeros_like(rows)
        ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
        active = torch.arange(len(rows), device=device)  # the completions that are in the batch
        for t in range(sampling.max_tokens):
            token, logprob = _draw(logits, uniforms[active, t], sampling)
            tokens[active, t], logprobs[active, t] = token, logprob
            lengths[active] += ~ended[active]
            ended[active] |= torch.isin(token, end_ids)
            going = ~ended[active]
            count = int(going.sum())
            if t + 1 == sampling.max_tokens or count == 0:
                break
            if count <= STILL_GOING * len(active):
                cache.batch_select_indices(going.nonzero().flatten())
                active, token, mask, position = active[going], token[going], mask[going], position[going]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            position = position + 1
            logits = self._step(token[:, None], mask, position[:, None], cache)
        columns = (tokens.tolist(), logprobs.tolist(), lengths.tolist(), ended.tolist())
        return [
            Completion(ids[:n], values[:n], truncated=not done) for ids, values, n, done in zip(*columns, strict=True)
        ]

    def _step(self, input_ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        output = self.model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()


def _draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """One token a row, and its log-probability under the distribution it was drawn from. (B, V), (B,) → (B,), (B,)"""
    if sampling.temperature == 0:
        logprobs = logits.log_softmax(-1)
        token = logits.argmax(-1)
    else:
        logprobs = _truncate((logits / sampling.temperature).log_softmax(-1), sampling)
        token = _invert(logprobs.exp(), uniform)
    return token, logprobs.gather(1, token[:, None]).squeeze(1)


def _invert(p: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the running sum of the probabilities passes the uniform. (B, V), (B,) → (B,)

    First the block, then the token in it: summing a whole vocabulary in float64, so that the sum does not reach a
    uniform below 1 too early, would take longer than all the rest of drawing.
    """
    blocks = nn.functional.pad(p, (0, -p.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))  # (B, V / BLOCK, BLOCK)
    sums = blocks.sum(-1).double().cumsum(-1)
    target = uniform[:, None].double() * sums[:, -1:]
    # Only where probabilities are not finite does a search end past the last block; the caller refuses those.
    block = torch.searchsorted(sums, target, right=True).clamp(max=sums.shape[1] - 1)  # (B, 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    inner = blocks[torch.arange(len(p), device=p.device), block.squeeze(1)].double().cumsum(-1)  # (B, BLOCK)
    # Both sums round on their own: the rest must not pass the block's last token, nor fall on one without probability.
    rest = torch.minimum(target - before, inner[:, -1:] * (1 - 1e-12)).clamp(min=0)
    token = block * BLOCK + torch.searchsorted(inner, rest, right=True)
    return token.squeeze(1).clamp(max=p.shape[1] - 1)


def _truncate(logprobs: Tensor, sampling: Sampling) -> Tensor:
    """Top-k, then top-p, renormalised."""
    if sampling.top_k == 0 and sampling.top_p == 1:
        return logprobs
    ordered, order = logprobs.sort(descending=True)
    drop = torch.zeros_like(ordered, dtype=torch.bool)
    if sampling.top_k:
        drop[:, sampling.top_k :] = True
    kept = ordered.masked_fill(drop, -torch.inf).softmax(-1)
    drop |= (kept.cumsum(-1) - kept) >= sampling.top_p
    return logprobs.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), -torch.inf).log_softmax(-1)


def _uniforms(requests: Sequence[Request], length: int) -> Tensor:
    """One stream of uniforms a completion, from its own seed. (B, length) float32 on the CPU"""
    seeds = [request.seed + i for request in requests for i in range(request.num_completions)]
    return torch.stack([torch.rand(length, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


def _chunks(requests: Sequence[Request], rows: int) -> list[list[Request]]:
    """Requests in order, cut where a chunk would hold more than `rows` completions."""
    chunks: list[list[Request]] = [[]]
    size = 0
    for request in requests:
        if chunks[-1] and size + request.num_completions > rows:
            chunks.append([])
            size = 0
        chunks[-1].append(request)
        size += request.num_completions
    return chunks
