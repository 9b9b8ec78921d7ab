"""Sequences packed into one row of tokens without padding: each prompt once, then all completions, which attend to it.

Every part of a decoder that works token by token, which is all except attention, computes each token once. Attention is
of one of three kinds: "varlen", torch's flash kernel for sequences of different lengths, in bfloat16 on a GPU; "flex",
flex attention with a block mask, a compiled kernel for any dtype on a GPU; "padded", on a CPU, blocks of completions of
like length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo_core.model.images import Shown, look, positions
from grpo_core.model.packed_rows import Gather, Repeat, Rows, lay_in_rows, use_rows
from grpo_core.model.sequences import Sequences, prompts_of
from grpo_core.system.torch_releases import SHARED_KEYS

Kind = Literal["padded", "varlen", "flex"]
NAME = "grpo_packed"  # of the attention function, among transformers'
FLEX_BLOCK = 128  # tokens; a packed batch is padded to two blocks or more: for one, flex attention is compiled again
ALIKE = 0.75  # completions longer than this share of the longest are padded to it; the others go to another block
SHORT = {torch.bfloat16: 512}  # keys up to which plain products are faster than torch's fused attention on a CPU


@dataclass(frozen=True)
class PackedBatch:
    """N tokens and where they belong: U prompts of at most P tokens, R completions of at most T inputs each."""

    input_ids: Tensor  # (1, N)
    positions: Tensor  # (1, N) in their own sequence; (3, 1, N) of a model that counts them by images
    predicts: Tensor  # (completion tokens,) position among the N whose hidden state predicts each, row by row
    attention: _Padded | _Varlen | _Members
    rows: Rows | None  # for layers that carry a state
    places: Tensor  # (N,) of each token among those of the sequences; a prompt's, in the first of its rows
    shown: Shown | None = None


@dataclass(frozen=True)
class _Padded:
    """A packed batch as padded blocks, for attention on a CPU: one of the U prompts, and some of the completions, those
    of like length together."""

    prompt_slots: Tensor  # (tokens of prompts,) in the U · P places
    num_prompts: int
    longest_prompt: int
    completions: tuple[_Block, ...]
    by_block: Tensor  # (tokens of completions,) block by block: each token of the blocks among those of all completions
    order: Tensor  # (tokens of completions,) and back


@dataclass(frozen=True)
class _Block:
    """R completions of at most T inputs each, behind prompts of at most P."""

    slots: Tensor  # (their tokens,) in the R · T places
    prompt_of: Tensor  # (R,)
    mask: Tensor  # (R, 1, T, P + T), True where a completion's token attends to a key


@dataclass(frozen=True)
class _Varlen:
    """S sequences: each prompt, then each completion. A sequence's queries are its own tokens; its keys are its
    prompt's and its own. Queries are in the order of the packed batch."""

    keys: Tensor  # (M,) token among the N of each key, sequence by sequence
    query_starts: Tensor  # (S + 1,) int32, place among the N where each sequence's queries start; the last is N
    key_starts: Tensor  # (S + 1,) int32, the same for its keys among the M
    longest_query: int
    longest_key: int


@dataclass(frozen=True)
class _Members:
    """Prompt and completion index of each token, for flex attention; padding belongs to no prompt."""

    prompt: Tensor  # (N,) number of its prompt
    completion: Tensor  # (N,) number of its completion, -1 in a prompt


def pack_batch(sequences: Sequences, kind: Kind, *, with_rows: bool = False, one_block: bool = False) -> PackedBatch:
    """Pack the sequences for one kind of attention, on the CPU. A completion's last token is no input: nothing comes
    after it. `with_rows`: also for layers that carry a state; `one_block`: pad all completions to the longest, for
    layers that would be compiled again for each number of blocks."""
    firsts, owners = prompts_of(sequences)
    of_row = torch.tensor(owners)
    prompts, completions = sequences.prompt_lengths[firsts], (sequences.completion_lengths - 1).clamp(min=0)
    prompt, prompt_position = _ragged(prompts)
    row, offset = _ragged(completions)
    position = sequences.prompt_lengths[row] + offset
    positions = torch.cat([prompt_position, position])
    places = torch.cat([torch.tensor(firsts)[prompt], row]) * sequences.input_ids.shape[1] + positions
    ids = sequences.input_ids.flatten()[places]

    ends, starts = prompts.cumsum(0) - 1, len(prompt) + completions.cumsum(0) - completions
    target_row, target = _ragged(sequences.completion_lengths)
    predicts = torch.where(target == 0, ends[of_row[target_row]], starts[target_row] + target - 1)

    if kind == "flex":
        padding = max(-len(ids) % FLEX_BLOCK, 2 * FLEX_BLOCK - len(ids))
        group = nn.functional.pad(torch.cat([prompt, of_row[row]]), (0, padding), value=-1)
        member = nn.functional.pad(torch.cat([torch.full_like(prompt, -1), row]), (0, padding), value=-2)
        ids, positions, places = (nn.functional.pad(each, (0, padding)) for each in (ids, positions, places))
        attention: _Padded | _Varlen | _Members = _Members(group, member)
    elif kind == "varlen":
        attention = _varlen(prompts, completions, of_row)
    else:
        alike = -1.0 if one_block else ALIKE
        attention = _padded(prompts, completions, of_row, (prompt, prompt_position), (row, offset), alike)
    rows = lay_in_rows(prompts, completions, of_row, len(ids)) if with_rows else None
    return PackedBatch(ids[None], positions[None], predicts, attention, rows, places)


def with_images(model: Any, batch: PackedBatch, sequences: Sequences) -> PackedBatch:
    """The packed batch as the model reads it: with the images among its tokens, and their positions."""
    ids, shown = look(model, batch.input_ids, packed=True)
    placed = positions(model, sequences.input_ids)
    found = batch.positions if placed is None else placed.flatten(1)[:, None, batch.places]
    return replace(batch, input_ids=ids, positions=found, shown=shown)


def packed_states(decoder: Any, batch: PackedBatch) -> Tensor:
    """Return the hidden states that predict the completion tokens, row by row. `decoder`: after `use_attention`, on the
    batch's device. (tokens, h)"""
    attention: Any = batch.attention
    if isinstance(attention, _Members):
        attention = _block_mask(attention.prompt, attention.completion)
    # transformers uses a mask of four dimensions as it is; without one, it makes one of N · N.
    mask = attention if isinstance(attention, BlockMask) else batch.input_ids[None, None]
    keys: dict[str, Any] = {"packed": attention} | ({"rows": batch.rows} if batch.rows else {})
    output = decoder(
        input_ids=batch.input_ids, position_ids=batch.positions, attention_mask=mask, use_cache=False, **keys
    )
    return output.last_hidden_state[0].index_select(0, batch.predicts)


def use_attention(decoder: Any) -> None:
    """Let a decoder with torch's fused attention take packed batches too. Not undone: recomputed layers need it
    again."""
    config = decoder.config
    use_rows(decoder)
    if config._attn_implementation != "sdpa":
        raise ValueError(f"attention is {config._attn_implementation!r}: packed batches need 'sdpa'")
    config._attn_implementation = NAME


def attend(
    module: nn.Module,
    query: Tensor,  # (1, H, N, d)
    key: Tensor,  # (1, K, N, d)
    value: Tensor,  # (1, K, N, d)
    attention_mask: Any,
    *,
    packed: _Padded | _Varlen | BlockMask | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: its own for rows, → (B, T, H, d); ours for a packed batch, → (1, N, H, d).

    Raises ValueError for a packed batch if the layer's attention is not plain.
    """
    if packed is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    # A window may be set: only models whose windows are longer than any sequence get packed batches.
    changes = {name: options.get(name) for name in ("softcap", "s_aux", "position_bias")}
    if any(value is not None for value in changes.values()):
        raise ValueError(f"a packed batch has plain causal attention only, this layer has {changes}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(packed, BlockMask):
        output = _flex(scale, query.is_cuda)(query, key, value, block_mask=packed)
        return output.transpose(1, 2).contiguous(), None
    if isinstance(packed, _Varlen):
        return _attend_varlen(query[0], key[0], value[0], packed, scale)[None], None
    return _attend_padded(query[0], key[0], value[0], packed, scale)[None], None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


def _attend_varlen(query: Tensor, key: Tensor, value: Tensor, sequences: _Varlen, scale: float) -> Tensor:
    """(H, N, d), (K, N, d), (K, N, e) → (N, H, e)"""
    size = value.shape[-1]  # latent attention's is smaller than that of queries and keys, and kernels want the same
    value = nn.functional.pad(value, (0, query.shape[-1] - size)) if size < query.shape[-1] else value
    keys, values = (Repeat.apply(x.transpose(0, 1), sequences.keys) for x in (key, value))
    mixed: Any = varlen_attn(
        query.transpose(0, 1),
        keys,
        values,
        sequences.query_starts,
        sequences.key_starts,
        sequences.longest_query,
        sequences.longest_key,
        scale=scale,
        window_size=(-1, 0),  # causal: a sequence's last query sees all of its keys
        **SHARED_KEYS,
    )
    return mixed[..., :size]


def _attend_padded(query: Tensor, key: Tensor, value: Tensor, blocks: _Padded, scale: float) -> Tensor:
    """(H, N, d), (K, N, d), (K, N, e) → (N, H, e)"""
    count = len(blocks.prompt_slots)
    (q1, q2), (k1, k2), (v1, v2) = ((x.transpose(0, 1)[:count], x.transpose(0, 1)[count:]) for x in (query, key, value))

    def prompts(x: Tensor) -> Tensor:
        return _spread(x, blocks.prompt_slots, blocks.num_prompts, blocks.longest_prompt)

    k_prompts, v_prompts = prompts(k1), prompts(v1)
    of_prompts = _gather(_attention(prompts(q1), k_prompts, v_prompts, None, scale), blocks.prompt_slots)
    if not blocks.completions:
        return of_prompts

    is_one = len(blocks.completions) == 1
    arranged = (x if is_one else Gather.apply(x, blocks.by_block) for x in (q2, k2, v2))
    parts = (x.split([len(block.slots) for block in blocks.completions]) for x in arranged)
    found = []
    for block, queries, keys, values in zip(blocks.completions, *parts, strict=True):
        rows, _, width, length = block.mask.shape
        q, k, v = (_spread(x, block.slots, rows, width) for x in (queries, keys, values))
        shared = (x[:, :, : length - width].index_select(0, block.prompt_of) for x in (k_prompts, v_prompts))
        k, v = (torch.cat([prompt, own], dim=2) for prompt, own in zip(shared, (k, v), strict=True))
        found.append(_gather(_attention(q, k, v, block.mask, scale), block.slots))
    return torch.cat([of_prompts, found[0] if is_one else Gather.apply(torch.cat(found), blocks.order)])


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(q kᵀ · scale) v, causal without a mask. (B, H, T, d), (B, K, S, d), (B, K, S, e) → (B, H, T, e)"""
    rows, heads, tokens, size = query.shape
    groups, keys = key.shape[1], key.shape[2]
    if keys > SHORT.get(query.dtype, 0):
        key, value = (x.repeat_interleave(heads // groups, dim=1) for x in (key, value))
        fused = nn.functional.scaled_dot_product_attention
        return fused(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale)
    if mask is None:
        mask = torch.ones(tokens, keys, dtype=torch.bool, device=query.device).tril()
    # The query heads of one key head are further rows of the same product.
    queries = query.reshape(rows * groups, -1, size)
    scores = torch.bmm(queries * scale, key.reshape(rows * groups, keys, size).transpose(1, 2))
    p = scores.view(rows, heads, tokens, keys).masked_fill(~mask, -torch.inf).softmax(-1)
    mixed = torch.bmm(p.view(rows * groups, -1, keys), value.reshape(rows * groups, keys, -1))
    return mixed.view(rows, heads, tokens, -1)


def _spread(x: Tensor, slots: Tensor, rows: int, width: int) -> Tensor:
    """(tokens, H, d) → (rows, H, width, d), zeros where there is no token"""
    padded = x.new_zeros(rows * width, *x.shape[1:]).index_copy(0, slots, x)
    return padded.view(rows, width, *x.shape[1:]).transpose(1, 2)


def _gather(x: Tensor, slots: Tensor) -> Tensor:
    """(rows, H, width, d) → (tokens, H, d)"""
    return Gather.apply(x.transpose(1, 2).flatten(0, 1), slots)


def _padded(
    prompts: Tensor,
    completions: Tensor,
    prompt_of: Tensor,
    in_prompts: tuple[Tensor, Tensor],
    in_completions: tuple[Tensor, Tensor],
    alike: float,
) -> _Padded:
    (prompt, prompt_position), (row, offset), longest = in_prompts, in_completions, int(prompts.max())
    blocks, block_of = list[_Block](), torch.full((len(completions),), -1)
    ordered = completions.argsort(descending=True, stable=True)
    left = ordered[completions[ordered] > 0]
    while len(left):
        t = int(completions[left[0]])
        together = completions[left] > alike * t
        rows, left = left[together].sort().values, left[~together]
        block_of[rows] = len(blocks)
        p, shared = int(prompts[prompt_of[rows]].max()), prompts[prompt_of[rows]]
        of_prompt = (torch.arange(p) < shared[:, None])[:, None].expand(-1, t, -1)
        own = torch.ones(t, t, dtype=torch.bool).tril().expand(len(rows), -1, -1)
        is_here = block_of[row] == len(blocks)
        slots = torch.searchsorted(rows, row[is_here]) * t + offset[is_here]
        blocks.append(_Block(slots, prompt_of[rows], torch.cat([of_prompt, own], dim=2)[:, None]))
    by_block = block_of[row].argsort(stable=True)
    slots = prompt * longest + prompt_position
    return _Padded(slots, len(prompts), longest, tuple(blocks), by_block, by_block.argsort())


def _varlen(prompts: Tensor, completions: Tensor, prompt_of: Tensor) -> _Varlen:
    """`prompts`: (U,) and `completions`: (R,) lengths as inputs."""
    starts = (lengths := torch.cat([prompts, completions])).cumsum(0) - lengths
    shared = prompts[prompt_of]
    key_lengths = torch.cat([prompts, torch.where(completions > 0, shared + completions, 0)])
    row, place = _ragged(key_lengths[len(prompts) :])
    # A completion's keys: its prompt's tokens, then its own.
    start = torch.where(place < shared[row], starts[prompt_of][row], starts[len(prompts) :][row] - shared[row])
    has_queries = lengths > 0
    return _Varlen(
        keys=torch.cat([torch.arange(int(prompts.sum())), start + place]),
        query_starts=nn.functional.pad(lengths[has_queries].cumsum(0), (1, 0)).int(),
        key_starts=nn.functional.pad(key_lengths[has_queries].cumsum(0), (1, 0)).int(),
        longest_query=int(lengths.max()),
        longest_key=int(key_lengths.max()),
    )


@torch.no_grad()
def _block_mask(group: Tensor, member: Tensor) -> BlockMask:
    """Mask by which a token attends to its prompt's and its own completion's tokens, up to itself."""

    def allowed(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (group[q] == group[k]) & ((member[k] == -1) | (member[q] == member[k]))

    return _create_block_mask(group.is_cuda)(allowed, None, None, len(group), len(group), device=str(group.device))


@cache
def _flex(scale: float, compiled: bool) -> Any:
    """Flex attention; the scale has to be a constant of the kernel.

    Compiled once for all lengths, for each of: training, scoring, a frozen model. `fullgraph` raises where dynamo would
    go on without compiling, with all N · N scores in memory: at what it cannot compile, and at its limit of
    compilations.
    """
    attention = partial(flex_attention, scale=scale, enable_gqa=True)
    return torch.compile(attention, dynamic=True, fullgraph=True) if compiled else attention


@cache
def _create_block_mask(compiled: bool) -> Any:
    """Return torch's function; compiled, it does not make the whole mask on its way to that of the blocks."""
    return torch.compile(create_block_mask, dynamic=True, fullgraph=True) if compiled else create_block_mask


def _ragged(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Row of each element, and its place there, for rows of these lengths laid end to end."""
    inside = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    return inside.nonzero(as_tuple=True)  # type: ignore[return-value]
