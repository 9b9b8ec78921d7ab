"""Sampling with the training model itself: nothing to install, nothing to synchronise; the default on a CPU. If
that model is sharded, the engine has a whole one of its own.

Each completion draws from its own stream of uniforms, so its tokens depend on its seed alone and not on the batch.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs

from grpo_core.config.memory_bounds import MAX_ROWS
from grpo_core.errors import EngineError
from grpo_core.model.images import keys, on_device, showing
from grpo_core.model.loading import whole_weights
from grpo_core.model.precision import in_float32
from grpo_core.model.routing import Routers, choices, reading
from grpo_core.model.sharded import is_sharded
from grpo_core.rollout.checksums import bit_sums, differences, noted, read, refuse_lost
from grpo_core.rollout.group_cache import GroupCache, why_not_captured, why_not_plain, why_not_shared
from grpo_core.rollout.rows import Rows, StopTexts, advance, begin_rows, completions, join, note_routes, select
from grpo_core.rollout.types import Completion, Finished, Request, Sampling, Stream, token_limit

JOIN_STEPS = 8  # at least, between two joins, which prefill prompts and copy the cache: about as long as a few steps
STILL_GOING = 0.75  # share of the batch; below it, finished completions leave, which costs a copy of the cache
WHOLE = {"sliding_attention": "full_attention", "chunked_attention": "full_attention", "hybrid_sliding": "hybrid"}
# What layers of a cache hold: by token, and by row.
TOKENS, STATES = ("keys", "values", "indexer_keys"), ("conv_states", "recurrent_states")


class TransformersEngine:
    """Satisfies `types.Engine` with a decoding loop over a Hugging Face causal LM; `max_length`: tokens of the longest
    sequence."""

    def __init__(self, model: nn.Module, tokenizer: Any, max_length: float = math.inf):
        padding = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)  # any token would do: it is masked
        self.pad_id = next(token for token in padding if token is not None)
        self.tokenizer, self.max_length = tokenizer, max_length
        self.routers: Routers | None = None  # of a mixture, if the experts that they choose go with completions
        self._use_model(model)
        # Both, as in vLLM: a chat model often ends its turns with another token than its tokenizer names.
        named = getattr(model.generation_config, "eos_token_id", None)
        named = named if isinstance(named, list) else [named]
        self.end_ids = torch.tensor([end for end in {*named, tokenizer.eos_token_id} if end is not None])

    @torch.no_grad()
    def sync_weights(self, model: nn.Module) -> str:
        if is_sharded(model):
            own, sent = self.model.state_dict(), dict[str, Any]()
            for name, weights in noted(whole_weights(model, self.model.dtype), sent, bit_sums):
                own[name].copy_(weights)
            held = {name: bit_sums(weights) for name, weights in self.model.state_dict().items()}
            refuse_lost(differences(*read(sent, held)))
            return "copied"
        if model is not self.model:
            self._use_model(model)
        return "shared"

    def close(self) -> None:
        pass

    def _use_model(self, model: Any) -> None:
        """Sample with this model from now on. Raises EngineError if cached prompts change the model's output."""
        self.model, self.notes = model, list[str]()
        why_not, wrong = self._share_cache(), ""
        if why_not:
            with in_float32(model):  # where rounding sends no token to another expert
                why_not = self._share_cache()
                wrong = why_not and why_not_plain(
                    model, partial(PlainCache, model, pad_id=self.pad_id), self.max_length
                )
        if wrong:
            raise EngineError(
                f"{type(model).__name__} does not give a padded prompt, with a cache, the logits of the prompt alone: "
                f"{wrong}. The transformers engine cannot sample from its policy; set rollout.engine to 'vllm'"
            )
        if why_not:
            self.notes.append(f"sampling keeps a prompt's keys and values once per completion: {why_not}")

    def _share_cache(self) -> str:
        """Decide whether completions share their prompt's keys and values, and whether steps are CUDA graphs. Returns
        why nothing is shared; "" if it is."""
        why_not = why_not_shared(self.model, self.max_length)
        self.shares_cache, self.captures = not why_not, False
        if self.shares_cache and next(self.model.parameters()).is_cuda:
            uncaptured = why_not_captured(self.model) or why_not_shared(self.model, self.max_length, captures=True)
            self.captures = not uncaptured
            if uncaptured:
                self.notes.append(f"sampling runs without CUDA graphs: {uncaptured}")
        return why_not

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Stream:
        """Draw a token for every row in each step. Waiting requests are prefilled together, and their rows join the
        others."""
        end_ids = self.end_ids.to(next(self.model.parameters()).device)
        waiting: list[tuple[int, Request]] = []
        asked: list[Request] = []
        drawn: defaultdict[int, dict[int, Completion]] = defaultdict(dict)  # of requests that are not finished
        routes: dict[int, np.ndarray] = {}  # of their prompts
        rows: Rows | None = None
        cache: Any = None
        logits = torch.empty(0)  # (B, V)
        more: Sequence[Request] = requests
        going = pause = 0
        stops = StopTexts(self.tokenizer, sampling.stop) if sampling.stop else None
        while True:
            waiting += enumerate(more, len(asked))
            asked += more
            new = _next_requests(waiting, MAX_ROWS - (len(rows.going) if rows else 0)) if pause <= 0 else {}
            if new:
                waiting, pause = waiting[len(new) :], JOIN_STEPS
                new_cache = self._make_cache([*new.values()], sampling)
                new_logits = new_cache.prefill()
                new_rows = begin_rows(new, sampling, new_logits, new_cache.chosen)
                if self.routers:
                    prompt_of = zip(new_rows.places[:, 0].tolist(), new_cache.group.tolist(), strict=True)
                    routes |= {number: new_cache.prompt_routes[place] for number, place in prompt_of}
                if stops:
                    stops.begin(new)
                if rows:
                    cache.join(new_cache)
                    rows, logits = join(rows, new_rows), torch.cat([logits, new_logits])
                else:
                    rows, cache, logits = new_rows, new_cache, new_logits
                going += len(new_rows.going)
            if not rows:
                return
            token, done = advance(rows, logits, sampling, end_ids, stops)
            before, going = going, int(rows.going.sum())
            finished: list[Finished] = []
            if going < before:
                for number, i, completion in completions(select(rows, done), routes):
                    drawn[number][i] = completion
                    if len(drawn[number]) == asked[number].num_completions:
                        routes.pop(number, None)
                        finished.append((number, [one for _, one in sorted(drawn.pop(number).items())]))
            more = (yield finished) or ()
            pause -= 1
            if going == 0:
                rows, pause = None, 0
            else:
                if going <= STILL_GOING * len(token):
                    cache.keep(rows.going)
                    token, rows = token[rows.going], select(rows, rows.going)
                logits = cache.decode(token)
                if self.routers:
                    note_routes(rows, cache.chosen)

    @torch.no_grad()
    def compute_logprobs(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        width = max(len(ids) for ids in sequences)
        padded = torch.tensor([ids + [self.pad_id] * (width - len(ids)) for ids in sequences])
        input_ids, shown = on_device(self.model, padded)
        # Padded on the right, where a causal model's other positions do not see it: no mask.
        with showing(self.model, shown):
            logits = self.model(input_ids=input_ids, use_cache=False, **keys(self.model, shown)).logits[:, :-1].float()
        logprobs = logits.log_softmax(-1).gather(2, input_ids[:, 1:, None]).squeeze(2).tolist()
        return [row[: len(ids) - 1] for row, ids in zip(logprobs, sequences, strict=True)]

    def _make_cache(self, requests: Sequence[Request], sampling: Sampling) -> Any:
        """Make a cache for the requests; consecutive ones with the same prompt share it."""
        alike = [[*members] for _, members in itertools.groupby(requests, lambda request: request.prompt_ids)]
        prompts = [members[0].prompt_ids for members in alike]
        copies = [sum(request.num_completions for request in members) for members in alike]
        longest = max(token_limit(request, sampling) for request in requests)
        if not self.shares_cache:
            cache: Any = PlainCache(self.model, prompts, copies, longest, self.pad_id)
        else:
            cache = GroupCache(self.model, prompts, copies, longest, captures=self.captures)
        cache.routers = self.routers
        return cache


def _next_requests(requests: Sequence[tuple[int, Request]], rows: int) -> dict[int, Request]:
    """Return as many of the first requests as have at most `rows` completions together. If all MAX_ROWS are free, a
    request with more is taken alone."""
    taken: dict[int, Request] = {}
    for number, request in requests:
        if request.num_completions > rows and (taken or rows < MAX_ROWS):
            break
        taken[number] = request
        rows -= request.num_completions
    return taken


class PlainCache:
    """transformers' own cache with the methods of `GroupCache`, for models whose attention is not the plain one: a row
    per completion, padded on the left. If layers carry a state, prompts are read without padding, in a pass for each
    length: few architectures keep padding out of all their states."""

    routers: Routers | None = None

    def __init__(self, model: Any, prompts: list[list[int]], copies: list[int], max_tokens: int, pad_id: int):
        self.model, self.prompts, self.pad_id = model, prompts, pad_id
        self.prompt_routes: dict[int, np.ndarray] = {}
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.argument = "cache_params" if "cache_params" in signature(base.forward).parameters else "past_key_values"
        self.group = torch.arange(len(prompts)).repeat_interleave(torch.tensor(copies))

    def prefill(self) -> Tensor:
        lengths = torch.tensor([len(ids) for ids in self.prompts])
        carries = carries_state(self.model.config)
        parts = [(lengths == each).nonzero().flatten() for each in lengths.unique()] if carries else [lengths.argsort()]
        logits: list[Tensor] = []
        for place, part in enumerate(parts):
            found = self._read([self.prompts[each] for each in part])
            if self.chosen is not None:
                given = self.chosen.cpu().unflatten(0, (len(part), -1)).numpy()
                for each, experts in zip(part.tolist(), given, strict=True):
                    self.prompt_routes[each] = experts[-len(self.prompts[each]) :]
            logits.append(found[0])
            if not place:
                _, self.cache, self.mask, self.positions = found
            else:
                self._append(*found[1:])
        rows = torch.cat(parts).argsort()[self.group].to(self.model.device)
        self.cache.reorder_cache(rows)
        self.mask, self.positions = self.mask[rows], self.positions[rows]
        return torch.cat(logits)[rows]

    def decode(self, token: Tensor) -> Tensor:
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        self.positions = self.positions + 1
        return self._step(self.cache, self.mask, token[:, None], position_ids=self.positions[:, None])

    def keep(self, rows: Tensor) -> None:
        self.cache.reorder_cache(rows.nonzero().flatten())
        self.mask, self.positions = self.mask[rows], self.positions[rows]

    def join(self, other: PlainCache) -> None:
        """Append the completions of another cache, padded on the left to the same width."""
        self._append(other.cache, other.mask, other.positions)

    def _append(self, cache: Any, mask: Tensor, positions: Tensor) -> None:
        unused = int(self.mask.any(0).int().argmax())  # columns that are padding everywhere
        width = max(self.mask.shape[1] - unused, mask.shape[1])

        def both(mine: Tensor, theirs: Tensor) -> Tensor:
            return torch.cat([nn.functional.pad(x, (0, 0, width - x.shape[-2], 0)) for x in (mine, theirs)])

        for layer, new in zip(self.cache.layers, cache.layers, strict=True):
            for name in TOKENS:
                if getattr(layer, name, None) is not None:
                    setattr(layer, name, both(getattr(layer, name), getattr(new, name)))
            for name in STATES:
                own, theirs = getattr(layer, name, {}), getattr(new, name, {})
                own |= {place: torch.cat([state, theirs[place]]) for place, state in own.items() if state is not None}
        self.mask = torch.cat([nn.functional.pad(each, (width - each.shape[1], 0)) for each in (self.mask, mask)])
        self.positions = torch.cat([self.positions, positions])

    def _read(self, prompts: list[list[int]]) -> tuple[Tensor, Any, Tensor, Tensor]:
        """Logits of each prompt's first completion token; the cache, its mask, and the position of the last token."""
        width = max(map(len, prompts))
        padding = [width - len(ids) for ids in prompts]
        mask = torch.tensor([[0] * n + [1] * (width - n) for n in padding])
        padded = torch.tensor([[self.pad_id] * n + each for n, each in zip(padding, prompts, strict=True)])
        ids, shown = on_device(self.model, padded, mask)
        mask, cache = mask.to(ids.device), whole_cache(self.model.config)
        given: dict[str, Any] = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} | keys(self.model, shown)
        with showing(self.model, shown):
            logits = self._step(cache, mask, ids, **given)
        positions = given["position_ids"].view(-1, *ids.shape)  # of text, those in time, height and width are the same
        return logits, cache, mask, positions.amax((0, 2))

    def _step(self, cache: Any, mask: Any, input_ids: Tensor, **given: Any) -> Tensor:
        # Without attention nothing is masked, and Mamba would multiply a state by all of it.
        mask = mask if any(hasattr(layer, "keys") for layer in cache.layers) else None
        options = {"use_cache": True, "logits_to_keep": 1, self.argument: cache}
        with reading(self.routers) as seen:
            output = self.model(input_ids=input_ids, attention_mask=mask, **given, **options)
        self.chosen = choices(seen) if seen else None
        return output.logits[:, -1].float()


def whole_cache(config: Any) -> Any:
    """transformers' cache for a model, which forgets no key: by its configuration, it would keep no more than a
    window's, and rows that are padded, or join later, begin at other places."""
    kinds, keys = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    cache = DynamicCache(config=config)
    cache.layers = [
        DYNAMIC_LAYER_TYPE_MAPPING[WHOLE.get(kind, kind)](**of_layer)
        for kind, of_layer in zip(kinds, keys, strict=True)
    ]
    return cache


def carries_state(config: Any) -> bool:
    """True if a layer carries a state from token to token."""
    return any(hasattr(layer, name) for layer in whole_cache(config).layers for name in STATES)
