"""Attention of one token per completion over its group's prompt and its own tokens, by one Triton kernel, for a GPU.

The kernel reads from the device how many tokens there are, so that a CUDA graph with it is right at every step.
"""

from __future__ import annotations

import triton
import triton.language as tl
from jaxtyping import Float, Int64
from torch import Tensor

KEYS = 32  # that a program multiplies at a time: at 256 numbers each in float32, what an A100 has room for
QUERIES = 16  # the fewest rows that a GPU's product has; query heads of a key head, and zeros


def attend_next(
    new: tuple[Float[Tensor, "B H d"], Float[Tensor, "B K d"], Float[Tensor, "B K e"]],
    prompts: tuple[Float[Tensor, "R K P d"], Float[Tensor, "R K P e"]],
    own: tuple[Float[Tensor, "B K C d"], Float[Tensor, "B K C e"]],
    group: Int64[Tensor, " B"],
    lengths: Int64[Tensor, " R"],
    first: Int64[Tensor, " B"],
    place: Int64[Tensor, 1],
    scale: float,
) -> Float[Tensor, "B H e"]:
    """`new`: queries, keys and values. Write keys and values to `place` among the own ones; attend to those from each
    completion's first place on, and to its prompt's."""
    query, key, value = (x.contiguous() for x in new)
    rows, heads, size = query.shape
    key_heads, out_size = value.shape[1:]
    out = query.new_empty(rows, heads, out_size)
    _attend_kernel[(rows, key_heads)](
        *(query, key, value, out, *prompts, *own, group, lengths, first, place),
        *(scale, prompts[0].shape[2], own[0].shape[2], heads // key_heads, key_heads, size, out_size),
        *(max(QUERIES, triton.next_power_of_2(heads // key_heads)), KEYS),
        *(max(16, triton.next_power_of_2(n)) for n in (size, out_size)),
    )
    return out


@triton.jit(do_not_specialize=["longest", "capacity"], do_not_specialize_on_alignment=["group", "lengths", "first"])
def _attend_kernel(
    query,
    key,
    value,
    out,
    prompt_keys,
    prompt_values,
    keys,
    values,
    group,
    lengths,
    first,
    place,
    scale,
    longest,
    capacity,
    heads,
    key_heads,
    size,
    out_size,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    OUT: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    of_head = row * key_heads + head
    prompt = tl.load(group + row)
    number, column, out_column = tl.arange(0, QUERIES), tl.arange(0, SIZE), tl.arange(0, OUT)
    inside = (number < heads)[:, None]
    places = (of_head * heads + number)[:, None]
    q = tl.load(query + places * size + column, mask=inside & (column < size), other=0.0)
    # The new token is the first that is seen: what it writes is not read again.
    k = tl.load(key + of_head * size + column, mask=column < size, other=0.0)
    v = tl.load(value + of_head * out_size + out_column, mask=out_column < out_size, other=0.0)
    end = tl.load(place)
    tl.store(keys + (of_head * capacity + end) * size + column, k, mask=column < size)
    tl.store(values + (of_head * capacity + end) * out_size + out_column, v, mask=out_column < out_size)
    largest = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale
    total = tl.full((QUERIES,), 1.0, tl.float32)
    mixed = tl.zeros((QUERIES, OUT), tl.float32) + v.to(tl.float32)
    offset, length = (prompt * key_heads + head) * longest, tl.load(lengths + prompt)
    keys_of, values_of = prompt_keys + offset * size, prompt_values + offset * out_size
    largest, total, mixed = _attend_part(
        q, keys_of, values_of, 0, length, scale, largest, total, mixed, column, out_column, size, out_size, KEYS
    )
    offset, begin = of_head * capacity, tl.load(first + row)
    keys_of, values_of = keys + offset * size, values + offset * out_size
    largest, total, mixed = _attend_part(
        q, keys_of, values_of, begin, end, scale, largest, total, mixed, column, out_column, size, out_size, KEYS
    )
    tl.store(out + places * out_size + out_column, mixed / total[:, None], mask=inside & (out_column < out_size))


@triton.jit
def _attend_part(
    q, keys, values, begin, end, scale, largest, total, mixed, column, out_column, size, out_size, KEYS: tl.constexpr
):
    """Go on with a softmax over keys from `begin` to before `end`: the largest score so far, Σ e^(score − largest), and
    the sum of the values with these factors."""
    for start in range(begin, end, KEYS):
        at = start + tl.arange(0, KEYS)
        seen = (at < end)[:, None]
        k = tl.load(keys + at[:, None] * size + column, mask=seen & (column < size), other=0.0)
        v = tl.load(values + at[:, None] * out_size + out_column, mask=seen & (out_column < out_size), other=0.0)
        scores = tl.where((at < end)[None], tl.dot(q, k.T, input_precision="ieee") * scale, float("-inf"))
        new = tl.maximum(largest, tl.max(scores, 1))
        p, shrunk = tl.exp(scores - new[:, None]), tl.exp(largest - new)
        mixed = mixed * shrunk[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        total, largest = total * shrunk + tl.sum(p, 1), new
    return largest, total, mixed
