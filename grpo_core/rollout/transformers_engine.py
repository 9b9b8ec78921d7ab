"""Sampling with the training model itself: nothing to install, nothing to synchronise; the default on a CPU. Beside a
sharded model it has a whole one of its own.

Each completion draws from its own stream of uniforms, so its tokens depend on its seed alone and not on the batch.
"""

from __future__ import annotations

import itertools
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
from grpo_core.rollout.types import Completion, Finished, Request, Sampling, Stream

MAX_BATCHES = 4  # that are decoded in turn: each is begun by requests that come later
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
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Stream:
        """Requests that are sent in begin as a batch of their own, whose steps alternate with those of the others."""
        device = next(self.model.parameters()).device
        waiting: list[tuple[int, Request]] = []
        batches: dict[Generator[list[Finished], None, None], dict[int, Request]] = {}  # that are being decoded
        count, more = 0, requests
        while True:
            waiting += enumerate(more, count)
            count += len(more)
            while waiting and len(batches) < MAX_BATCHES:
                rows = sum(request.num_completions for batch in batches.values() for request in batch.values())
                batch = _first_rows(waiting, MAX_ROWS - rows)
                if not batch:
                    break
                waiting = waiting[len(batch) :]
                batches[self._generate([*batch.values()], sampling, device)] = batch
            finished: list[Finished] = []
            for steps, batch in [*batches.items()]:
                step = next(steps, None)
                if step is None:
                    del batches[steps]
                else:
                    numbers = [*batch]
                    finished += [(numbers[number], completions) for number, completions in step]
            if not (batches or waiting or finished):
                return
            more = (yield finished) or ()

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
        """One batch. Requests with the same prompt, one behind the other, share it."""
        alike = [[*members] for _, members in itertools.groupby(requests, lambda request: request.prompt_ids)]
        prompts = [members[0].prompt_ids for members in alike]
        copies = [sum(request.num_completions for request in members) for members in alike]
        longest = max(_limit(request, sampling) for request in requests)
        if self.shares_cache:
            cache: Any = GroupCache(self.model, prompts, copies, longest)
        else:
            cache = PlainCache(self.model, prompts, copies, longest, self.pad_id)
        logits = cache.prefill()
        end_ids = self.end_ids.to(device)
        points = uniforms(requests, longest).to(device)  # (B, T)
        tokens = torch.zeros(points.shape, dtype=torch.int64, device=device)
        logprobs = torch.zeros_like(points)
        lengths = torch.zeros(len(points), dtype=torch.int64, device=device)
        ended = torch.zeros(len(points), dtype=torch.bool, device=device)
        active = torch.arange(len(points), device=device)  # the completions that are in the batch

        sizes = torch.tensor([request.num_completions for request in requests], device=device)
        group = torch.arange(len(requests), device=device).repeat_interleave(sizes)  # the request of each completion
        limits = torch.tensor([_limit(request, sampling) for request in requests], device=device)[group]
        unfinished, left = list(range(len(requests))), len(points)
        for t in range(longest):
            token, logprob = draw(logits, points[active, t], sampling)
            tokens[active, t], logprobs[active, t] = token, logprob
            lengths[active] += ~(ended | (limits <= t))[active]
            ended[active] |= torch.isin(token, end_ids) & (limits > t)[active]
            going_on = ~ended & (limits > t + 1)
            going = going_on[active]
            count = int(going.sum())
            if count == 0:
                break
            finished: list[int] = []
            if count < left:
                left = count
                members = torch.zeros(len(requests), device=device).index_add_(0, group, going_on.float()).tolist()
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


def _limit(request: Request, sampling: Sampling) -> int:
    return sampling.max_tokens if request.max_tokens is None else request.max_tokens


def _first_rows(requests: Sequence[tuple[int, Request]], rows: int) -> dict[int, Request]:
    """As many of the first requests as have at most `rows` completions together; of no rows at all, one that has more
    than MAX_ROWS is taken alone."""
    taken: dict[int, Request] = {}
    for number, request in requests:
        if request.num_completions > rows and (taken or rows < MAX_ROWS):
            break
        taken[number] = request
        rows -= request.num_completions
    return taken
