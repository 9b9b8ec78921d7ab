"""Decoding with one copy of each prompt's keys and values for all completions of its group, none of them padded.

transformers calls a function of ours for a model's attention. It keeps keys and values itself: those of a prompt
once, which all its completions multiply in one product, and those of the completions in place, in buffers that grow. On
a CPU these are read whole, since products in bfloat16 would first copy a part of them. One softmax goes over both, so
that the result is that of plain attention.

Each step writes the keys and values of all completions at one place, also when completions join later: their places
begin at the step at which they join, and a mask hides the places before. Places that only finished completions have
used are dropped, so that the buffers are as long as the longest completion that goes on.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_core.model.capabilities import (
    NOT_TO_ALL,
    TOLERANCE,
    attends_to_all,
    decoder,
    in_words,
    probe_width,
    probed,
    random_ids,
    relative_difference,
    shortened,
    with_image,
)
from grpo_core.model.images import keys, on_device, showing
from grpo_core.model.routing import Routers, choices, reading

NAME = "grpo_group_cache"
FIRST_CAPACITY = 64  # initial capacity of captured steps, in tokens of a completion; then it doubles
GROWTH = 32  # tokens by which the buffers grow where steps are not captured, and all of a buffer is read
GRAPH_TOKENS = 64  # on a GPU a captured step reads a multiple of these, and is used as often; divides every capacity
# Options that attention may ignore; a window is longer than any sequence where the cache is shared.
HARMLESS = {"dropout", "position_ids", "position_embeddings", "use_cache", "sliding_window"}


@dataclass
class Layer:
    """Keys and values of one attention layer."""

    prompt_keys: Tensor  # (R, H, P, D)
    prompt_values: Tensor
    keys: Tensor  # (B, H, capacity, D) of the completions, masked where a completion has none
    values: Tensor


class GroupCache:
    """R prompts of up to P tokens and B completions, in the order of their prompts. `captures`: run steps as CUDA
    graphs."""

    def __init__(
        self, model: Any, prompts: list[list[int]], copies: list[int], max_tokens: int, *, captures: bool = False
    ):
        self.model, self.decoder = model, decoder(model)
        device = next(model.parameters()).device
        self.layers: dict[int, Layer] = {}
        self.lengths = torch.tensor([len(ids) for ids in prompts], device=device)
        padded = nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in prompts], batch_first=True)
        self.input_ids, self.shown = on_device(model, padded)  # (R, P)
        outside = torch.arange(self.input_ids.shape[1], device=device) >= self.lengths[:, None]
        self.prompt_bias = torch.zeros(outside.shape, device=device).masked_fill(outside, -torch.inf)  # (R, P)
        self.group = torch.arange(len(prompts), device=device).repeat_interleave(torch.tensor(copies, device=device))
        self.positions = self._after_prompts()[self.group]  # (B,) of the next token
        self.first = torch.zeros_like(self.positions)  # (B,) place of each completion's first token
        self.next = torch.zeros(1, dtype=torch.int64, device=device)  # place of the next token of all completions
        self.step, self.capacity = 0, 0
        self.captures = captures
        self.routers: Routers | None = None
        self.block = GRAPH_TOKENS if captures else 1  # tokens of completions that are read at a time
        self.max_tokens = -(-max_tokens // self.block) * self.block
        self.graph: Any = None
        self._lay_out()

    def prefill(self) -> Tensor:
        """Return the logits of each completion's first token. (B, V)"""
        rows = torch.arange(len(self.lengths), device=self.lengths.device)

        def last_only(module: nn.Module, arguments: Any, output: Any) -> Any:
            output.last_hidden_state = output.last_hidden_state[rows, self.lengths - 1][:, None]
            return output

        # Padded on the right, where a causal model's other positions do not see it: no mask.
        positions = None if self.shown is None else self.shown.positions
        if positions is None:
            positions = torch.arange(self.input_ids.shape[1], device=rows.device)[None]
        hook = self.decoder.register_forward_hook(last_only)
        try:
            with showing(self.model, self.shown):
                logits = self._forward(self.input_ids, positions)
        finally:
            hook.remove()
        if self.chosen is not None:
            given = self.chosen.cpu().unflatten(0, self.input_ids.shape).numpy()
            self.prompt_routes = [experts[:n] for experts, n in zip(given, self.lengths.tolist(), strict=True)]
        return logits[self.group]

    def _after_prompts(self) -> Tensor:
        """Position of the token after each prompt. (R,)"""
        if self.shown is None or self.shown.positions is None:
            return self.lengths
        inside = torch.arange(self.input_ids.shape[1], device=self.lengths.device) < self.lengths[:, None]
        return (self.shown.positions * inside).amax((0, 2)) + 1

    def decode(self, token: Tensor) -> Tensor:
        """Return the logits of the tokens after these. (B,) → (B, V)"""
        if self.step == self.capacity:
            self._drop_unused()
            growth = max(self.step, FIRST_CAPACITY) if self.captures else GROWTH
            capacity = min(self.step + growth, self.max_tokens)
            self._resize(capacity if capacity > self.step else self.step + growth)  # completions joined later
        logits = self._replay(token) if self.captures else self._forward(token[:, None], self.positions[:, None])
        self.step += 1
        self.next += 1
        self.positions += 1
        return logits

    def keep(self, rows: Tensor) -> None:
        """Keep only these completions. (B,) bool"""
        self.positions, self.first = self.positions[rows], self.first[rows]
        groups, self.group = self.group[rows].unique_consecutive(return_inverse=True)
        self.lengths, self.prompt_bias = self.lengths[groups], self.prompt_bias[groups]
        for layer in self.layers.values():
            layer.prompt_keys, layer.prompt_values = layer.prompt_keys[groups], layer.prompt_values[groups]
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]
        self._lay_out()

    def join(self, other: GroupCache) -> None:
        """Append the completions of another cache, which has read only its prompts."""
        self._drop_unused()
        width = int(torch.cat([self.lengths, other.lengths]).max())  # of the longest prompt

        def both(mine: Tensor, theirs: Tensor) -> Tensor:
            return torch.cat([nn.functional.pad(x, (0, 0, 0, width - x.shape[2])) for x in (mine, theirs)])

        for index, layer in self.layers.items():
            new = other.layers[index]
            layer.prompt_keys = both(layer.prompt_keys, new.prompt_keys)
            layer.prompt_values = both(layer.prompt_values, new.prompt_values)
            more = (0, 0, 0, 0, 0, 0, 0, len(other.group))
            layer.keys, layer.values = nn.functional.pad(layer.keys, more), nn.functional.pad(layer.values, more)
        biases = (self.prompt_bias, other.prompt_bias)
        self.prompt_bias = torch.cat(
            [nn.functional.pad(bias, (0, width - bias.shape[1]), value=-torch.inf) for bias in biases]
        )
        self.group = torch.cat([self.group, other.group + len(self.lengths)])
        self.lengths = torch.cat([self.lengths, other.lengths])
        self.positions = torch.cat([self.positions, other.positions])
        self.first = torch.cat([self.first, self.next.expand(len(other.group))])
        self.max_tokens = max(self.max_tokens, other.max_tokens)
        self._lay_out()

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Compute one layer's attention, and keep its new keys and values. (B, heads, T, D) → (B, T, heads, D)"""
        if module.layer_idx not in self.layers:
            room = key.new_zeros(len(self.group), key.shape[1], 0, key.shape[3])
            room_values = value.new_zeros(len(self.group), value.shape[1], 0, value.shape[3])
            # Contiguous: each step would copy them for its products.
            self.layers[module.layer_idx] = Layer(key.contiguous(), value.contiguous(), room, room_values)
            return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, is_causal=True)[0]
        layer = self.layers[module.layer_idx]
        layer.keys.index_copy_(2, self.next, key)
        layer.values.index_copy_(2, self.next, value)
        keys, values = layer.keys[:, :, : self.visible], layer.values[:, :, : self.visible]
        rows, heads, _, size = query.shape
        queries = (query * scaling).view(rows, key.shape[1], -1, size)  # by the key head that they read
        prompt = self._from_grid(self._to_grid(queries) @ layer.prompt_keys.transpose(2, 3), queries)
        own = queries @ keys.transpose(2, 3)
        scores = torch.cat([prompt + self.row_bias, own + self.own_bias], dim=-1)
        shares = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        of_prompt, of_own = shares.split([prompt.shape[-1], own.shape[-1]], dim=-1)
        mixed = self._from_grid(self._to_grid(of_prompt) @ layer.prompt_values, queries) + of_own @ values
        return mixed.reshape(rows, 1, heads, value.shape[3])

    def _lay_out(self) -> None:
        """Find each completion's place in the grid of R prompts times the largest group."""
        groups, sizes = self.group.unique_consecutive(return_counts=True)
        self.width = int(sizes.max())
        first = sizes.cumsum(0) - sizes
        member = torch.arange(len(self.group), device=sizes.device) - first[self.group]
        self.slots = None if len(self.group) == len(groups) * self.width else self.group * self.width + member
        self.row_bias = self.prompt_bias[self.group][:, None, None]  # (B, 1, 1, P)
        self.graph = None

    def _to_grid(self, x: Tensor) -> Tensor:
        """(B, H, n, …) → (R, H, width · n, …), zeros where a group has fewer completions than the largest."""
        if self.slots is not None:
            x = x.new_zeros(len(self.prompt_bias) * self.width, *x.shape[1:]).index_copy_(0, self.slots, x)
        return x.unflatten(0, (-1, self.width)).transpose(1, 2).flatten(2, 3)

    def _from_grid(self, x: Tensor, like: Tensor) -> Tensor:
        """Undo `_to_grid`: (R, H, width · n, …) → (B, H, n, …)."""
        x = x.unflatten(2, (self.width, like.shape[2])).transpose(1, 2).flatten(0, 1)
        return x if self.slots is None else x[self.slots]

    def _drop_unused(self) -> None:
        """Drop whole blocks of places before the first that a completion uses."""
        unused = int(self.first.min()) // self.block * self.block
        for layer in self.layers.values():
            layer.keys, layer.values = layer.keys[:, :, unused:], layer.values[:, :, unused:]
        self.first, self.next = self.first - unused, self.next - unused
        self.step, self.capacity, self.graph = self.step - unused, self.capacity - unused, None

    def _resize(self, capacity: int) -> None:
        for layer in self.layers.values():
            more = (0, 0, 0, capacity - self.capacity)
            layer.keys, layer.values = nn.functional.pad(layer.keys, more), nn.functional.pad(layer.values, more)
        self.capacity, self.graph = capacity, None

    def _forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the logits after the last of these tokens. (…, T) → (…, V)"""
        self.visible = (self.step // self.block + 1) * self.block if self.captures else self.capacity
        places = torch.arange(self.visible, device=positions.device)
        hidden = ((places < self.first[:, None]) | (places > self.next))[:, None, None]
        self.own_bias = torch.zeros(hidden.shape, device=positions.device).masked_fill(hidden, -torch.inf)
        options = {"use_cache": False, "logits_to_keep": 1, "group_cache": self}
        with _attention_of_ours(self.decoder.config), reading(self.routers) as seen:
            logits = self.model(input_ids=input_ids, position_ids=positions, **options).logits[:, -1].float()
        self.chosen = choices(seen) if seen else None
        return logits

    def _replay(self, token: Tensor) -> Tensor:
        """Run a step as a CUDA graph, without Python's overhead. It is captured again when shapes change."""
        if self.graph is None or self.step % GRAPH_TOKENS == 0:
            self.token, self.place = token[:, None].clone(), self.positions[:, None].clone()
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # what is set up at a first call must not be captured
                self._forward(self.token, self.place)
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            # Rewards that load a model in a thread allocate meanwhile: in the "global" mode that ends the capture.
            capture = torch.cuda.graph(self.graph, capture_error_mode="thread_local")
            try:
                with capture:
                    self.logits = self._forward(self.token, self.place)
            except BaseException:  # a stop may come when the capture has begun and the block has not
                if torch.cuda.is_current_stream_capturing():
                    capture.__exit__(None, None, None)
                raise
        self.token.copy_(token[:, None])
        self.place.copy_(self.positions[:, None])
        self.graph.replay()
        return self.logits


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    group_cache: GroupCache | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function that transformers calls."""
    unknown = {name for name, option in options.items() if option is not None and option is not False} - HARMLESS
    if group_cache is None or attention_mask is not None or unknown or not hasattr(module, "layer_idx"):
        found = ", ".join(sorted(unknown)) or "a mask or layers of its own kind"
        raise ValueError(f"a shared cache has plain causal attention only, {type(module).__name__} has {found}")
    return group_cache.attend(module, query, key, value, scaling or query.shape[-1] ** -0.5), None


ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)


@contextmanager
def _attention_of_ours(config: Any) -> Iterator[None]:
    former = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = former


@torch.no_grad()
def why_not_captured(model: Any) -> str:
    """Reason why a step with this cache cannot be a CUDA graph, which holds nothing that the host waits for; "" if it
    can be one. Nothing is captured: a capture that fails would leave torch's allocator unable to give memory back."""
    cache = GroupCache(model, [[0, 1, 2]], [1], max_tokens=2)
    token = torch.zeros(1, dtype=torch.int64, device=model.device)
    former = torch.cuda.get_sync_debug_mode()
    try:
        cache.prefill()
        cache.decode(token)  # what is set up at a first call may wait
        torch.cuda.set_sync_debug_mode("error")
        cache.decode(token)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever another architecture raises
        places = traceback.extract_tb(error.__traceback__)
        place = next((each for each in reversed(places) if "transformers" in each.filename), places[-1])
        return f"{in_words(error)}, in {'/'.join(Path(place.filename).parts[-2:])}:{place.lineno}, `{place.line}`"
    finally:
        torch.cuda.set_sync_debug_mode(former)
    return ""


def why_not_shared(model: Any, max_length: float, *, captures: bool = False) -> str:
    """Reason why prompts cannot be shared by this cache in sequences of up to `max_length` tokens; "" if they can be,
    and logits match those of a plain pass.

    They cannot where layers attend to a window only, cap their scores or carry a state.
    """
    if not attends_to_all(model.config.get_text_config(), max_length):
        return NOT_TO_ALL
    return why_not_plain(model, partial(GroupCache, model, captures=captures), max_length)


@torch.no_grad()
def why_not_plain(model: Any, make_cache: Callable[..., Any], max_length: float) -> str:
    """Reason why logits with the cache are not those of a plain pass; "" if they are, for prompts of different lengths,
    one of which joins after the others have been decoded for a step. One is as long as PROBED tokens allow, which are
    to the model what the longest sequence of `max_length` tokens will be. Raises torch.OutOfMemoryError if memory runs
    out, which says nothing about the model."""
    width = probe_width(decoder(model).config, max_length, probed(model))
    rows = random_ids(model, (4, max(width, 9)))
    rows[2] = rows[1]  # two completions of one prompt
    lengths = [max(width - 3, 3), 5, 5, 2]
    prompts = [ids[:length].tolist() for ids, length in zip(rows, lengths, strict=True)]
    later = [ids[5:8].tolist() for ids in rows]
    later[2], later[3] = later[2][::-1], later[3][:2]
    prompts[0] = with_image(model, rows[:1], lengths[0])[0, : lengths[0]].tolist()
    steps = [torch.tensor([ids[0] for ids in later[:3]])]
    steps += [torch.tensor([*(ids[step] for ids in later[:3]), later[3][step - 1]]) for step in (1, 2)]
    steps = [step.to(model.device) for step in steps]
    with shortened(model, width, max_length):
        try:
            cache = make_cache(prompts[:2], [1, 2], max_tokens=4)
            # A captured step writes its logits to the same place each time.
            cached = [cache.prefill(), cache.decode(steps[0]).clone()]
            joining = make_cache(prompts[3:], [1], max_tokens=4)
            cached[1] = torch.cat([cached[1], joining.prefill()])
            cache.join(joining)
            cached += [cache.decode(tokens).clone() for tokens in steps[1:]]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever another architecture raises
            return in_words(error)
        allowed = TOLERANCE[model.dtype]
        for row, (prompt, tokens) in enumerate(zip(prompts, later, strict=True)):
            ids, shown = on_device(model, torch.tensor([prompt + tokens]))
            with showing(model, shown):
                plain = model(input_ids=ids, use_cache=False, **keys(model, shown)).logits
            plain = plain[0, len(prompt) - 1 :].float()
            found = torch.stack([logits[row] for logits in cached[-len(plain) :]])
            difference = relative_difference(found, plain)
            if not difference < allowed:
                return f"logits differ from a plain pass's by {difference:.2g}, and {allowed:.2g} is allowed"
    return ""
