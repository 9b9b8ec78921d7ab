"""Sampling with the training model itself: nothing to install, nothing to synchronise; the default on a CPU. Beside a
sharded model it has a whole one of its own.

Each completion draws from its own stream of uniforms, so its tokens depend on its seed alone and not on the batch.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from grpo_core.config.memory_bounds import MAX_ROWS
from grpo_core.model.loading import whole_weights
from grpo_core.model.precision import in_float32
from grpo_core.model.sharded import is_sharded
from grpo_core.rollout.group_cache import GroupCache, can_share_cache, says_the_same
from grpo_core.rollout.sampling import draw, uniforms
from grpo_core.rollout.types import Completion, Finished, Request, Sampling

STILL_GOING = 0.75  # share of the batch; below it, finished completions leave, which costs a copy of the cache


class TransformersEngine:
    """Satisfies `engine.Engine` with a decoding loop over a Hugging Face causal LM; `max_length`: tokens of the longest
    sequence."""

    def __init__(self, model: nn.Module, tokenizer: Any, max_length: float = math.inf):
        padding = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)  # any token would do: it is masked
        self.pad_id = next(token for token in padding if token is not None)
        self.max_length = max_length
        self._take(model)
        # Both, as in vLLM: a chat model often ends its turns with another token than its tokenizer names.
        named = getattr(model.generation_config, "eos_token_id", None)
        named = named if isinstance(named, list) else [named]
        self.end_ids = torch.tensor([end for end in {*named, tokenizer.eos_token_id} if end is not None])

    @torch.no_grad()
    def sync_weights(self, model: nn.Module) -> str:
        if is_sharded(model):
            own = self.model.state_dict()
            for name, weights in whole_weights(model, self.model.dtype):
                own[name].copy_(weights)
            return "copied"
        if model is not self.model:
            self._take(model)
        return "shared"

    def close(self) -> None:
        pass

    def _take(self, model: Any) -> None:
        """ValueError for a model that says something else when it goes on from what it has kept of prompts."""
        self.model, self.shares_cache = model, can_share_cache(model, self.max_length)
        right = self.shares_cache
        if not right:
            with in_float32(model):  # where rounding sends no token to another expert
                self.shares_cache = can_share_cache(model, self.max_length)
                right = self.shares_cache or says_the_same(model, partial(PlainCache, model, pad_id=self.pad_id))
        if not right:
            raise ValueError(
                f"{type(model).__name__} says something else of a padded prompt than of the prompt alone, as layers do "
                "that carry a state: the transformers engine would sample from another policy; set rollout.engine to "
                "'vllm'"
            )

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Generator[list[Finished], None, None]:
        if not requests:
            return
        device = next(self.model.parameters()).device
        first = 0
        for chunk in _chunks(requests, MAX_ROWS):
            for finished in self._generate(chunk, sampling, device):
                yield [(first + number, completions) for number, completions in finished]
            first += len(chunk)

    @torch.no_grad()
    def compute_logprobs(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        device = next(self.model.parameters()).device
        width = max(len(ids) for ids in sequences)
        input_ids = torch.tensor([ids + [self.pad_id] * (width - len(ids)) for ids in sequences], device=device)
        # Padded on the right, where a causal model's other positions do not see it: no mask.
        logits = self.model(input_ids=input_ids, use_cache=False).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(2, input_ids[:, 1:, None]).squeeze(2).tolist()
        return [row[: len(ids) - 1] for row, ids in zip(logprobs, sequences, strict=True)]

    def _generate(
        self, requests: Sequence[Request], sampling: Sampling, device: torch.device
    ) -> Generator[list[Finished], None, None]:
        prompts = [request.prompt_ids for request in requests]
        copies = [request.num_completions for request in requests]
        if self.shares_cache:
            cache: Any = GroupCache(self.model, prompts, copies, sampling.max_tokens)
        else:
            cache = PlainCache(self.model, prompts, copies, sampling.max_tokens, self.pad_id)
        logits = cache.prefill()
        end_ids = self.end_ids.to(device)
        points = uniforms(requests, sampling.max_tokens).to(device)  # (B, T)
        tokens = torch.zeros(points.shape, dtype=torch.int64, device=device)
        logprobs = torch.zeros_like(points)
        lengths = torch.zeros(len(points), dtype=torch.int64, device=device)
        ended = torch.zeros(len(points), dtype=torch.bool, device=device)
        active = torch.arange(len(points), device=device)  # the completions that are in the batch

        group = cache.group.clone()  # the request of each completion
        unfinished, left = list(range(len(requests))), len(points)
        for t in range(sampling.max_tokens):
            token, logprob = draw(logits, points[active, t], sampling)
            tokens[active, t], logprobs[active, t] = token, logprob
            lengths[active] += ~ended[active]
            ended[active] |= torch.isin(token, end_ids)
            going = ~ended[active]
            count = int(going.sum())
            if count == 0 or t + 1 == sampling.max_tokens:
                break
            finished: list[int] = []
            if count < left:
                left = count
                members = torch.zeros(len(requests), device=device).index_add_(0, group, (~ended).float()).tolist()
                finished = [number for number in unfinished if members[number] == 0]
                unfinished = [number for number in unfinished if members[number] > 0]
            yield [(number, _completions(group == number, tokens, logprobs, lengths, ended)) for number in finished]
            if count <= STILL_GOING * len(active):
                cache.keep(going)
                active, token = active[going], token[going]
            logits = cache.decode(token)
        yield [(number, _completions(group == number, tokens, logprobs, lengths, ended)) for number in unfinished]


class PlainCache:
    """transformers' own cache behind the methods of `GroupCache`, for models whose attention is not the plain one."""

    def __init__(self, model: Any, prompts: list[list[int]], copies: list[int], max_tokens: int, pad_id: int):
        self.model, device = model, model.device
        width = max(map(len, prompts))
        padding = [width - len(ids) for ids in prompts]
        self.mask = torch.tensor([[0] * n + [1] * (width - n) for n in padding], device=device)
        self.input_ids = torch.tensor([[pad_id] * n + ids for n, ids in zip(padding, prompts, strict=True)])
        self.input_ids = self.input_ids.to(device)
        self.group = torch.arange(len(prompts), device=device).repeat_interleave(torch.tensor(copies, device=device))
        self.cache = DynamicCache()

    def prefill(self) -> Tensor:
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)
        logits = self._step(self.input_ids, positions)
        self.cache.batch_select_indices(self.group)
        self.mask, self.positions = self.mask[self.group], positions[self.group, -1]
        return logits[self.group]

    def decode(self, token: Tensor) -> Tensor:
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        self.positions = self.positions + 1
        return self._step(token[:, None], self.positions[:, None])

    def keep(self, rows: Tensor) -> None:
        self.cache.batch_select_indices(rows.nonzero().flatten())
        self.mask, self.positions = self.mask[rows], self.positions[rows]

    def _step(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        output = self.model(
            input_ids=input_ids,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()


def _completions(rows: Tensor, *columns: Tensor) -> list[Completion]:
    """The completions of `rows`. `columns`: token ids, log-probabilities, lengths, whether they ended."""
    return [
        Completion(ids[:n], logprobs[:n], truncated=not ended)
        for ids, logprobs, n, ended in zip(*(column[rows].tolist() for column in columns), strict=True)
    ]


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
