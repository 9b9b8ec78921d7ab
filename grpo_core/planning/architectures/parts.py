"""What layers are made of, for forecasts: attention, recurrences, MLPs, experts. Sizes are numbers, not bytes.

What a part keeps between its forward and its backward pass is what autograd saves of transformers' own code. Its
recurrences are those in Python, in chunks of tokens: kernels of other packages keep less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DELTA_CHUNK = 64  # tokens, in transformers' gated delta rules


@dataclass(frozen=True)
class Linear:
    """A linear layer, or one of each expert."""

    inputs: int
    outputs: int
    source: str = ""  # those of a part with one source keep one input; "": what the part keeps in any case
    names: tuple[str, ...] = ()  # by which LoRA adapts it, with a rank for each; none: it does not
    copies: int = 1  # one per expert
    taken: int = 1  # of these, by a token


@dataclass(frozen=True)
class Part:
    """A part of a layer. What it keeps is per token, unless said otherwise."""

    linear: tuple[Linear, ...] = ()
    other: int = 0  # parameters beside those
    idle: int = 0  # of them, those of experts that a token does not take
    norms: tuple[tuple[int, int], ...] = ()  # numbers that each norm takes, and statistics that it keeps
    half: float = 0  # kept in the precision of the pass, beside inputs of linear layers
    single: float = 0  # kept in float32
    keys: float = 0  # kept per key
    score_bytes: float = 0  # kept per token and key, where attention is not fused
    widest: float = 0  # that a token passes, in an MLP or experts
    recurred: float = 0  # float32 gradients in a recurrence's backward pass
    chunk: int = 1  # tokens that are padded to a multiple of it
    is_recurrent: bool = False  # sees sequences in rows of their own
    window: int | None = None  # earlier tokens that it attends to
    groups: int = 1  # query heads per key head
    cached: int = 0  # kept per token in sampling, of keys and values
    latent: int = 0  # kept instead of those by vLLM
    convolved: int = 0  # kept per sequence in sampling
    state: int = 0  # the same in float32

    @property
    def parameters(self) -> int:
        return self.other + sum(it.inputs * it.outputs * it.copies for it in self.linear)

    @property
    def active(self) -> int:
        """Parameters that a token passes."""
        return self.other - self.idle + sum(it.inputs * it.outputs * it.taken for it in self.linear)


def norm(size: int, number: int) -> Part:
    return Part(other=number * size, norms=((size, 1),) * number)


def attention(
    hidden: int,
    heads: int,
    groups: int,
    size: int,
    *,
    window: int | None = None,
    biases: str = "",
    normed: str = "",
    gated: bool = False,
    fused: bool = False,
    sinks: bool = False,
    capped: bool = False,
    output: str = "o_proj",
) -> Part:
    """Attention of query heads, `groups` of which share keys. `biases`: of "qkv", or "qkvo". `normed`: queries and keys,
    each "head" or the "whole"."""
    q, kv = heads * size, heads // groups * size
    projected = {"q_proj": q * (1 + gated), "k_proj": kv, "v_proj": kv}
    if fused:
        projected = {"qkv_proj": q + 2 * kv}
    eager = sinks or capped
    into = [Linear(hidden, out, "hidden", (name,)) for name, out in projected.items()]
    norms = {"head": ((q, heads), (kv, heads // groups)), "whole": ((q, 1), (kv, 1))}.get(normed, ())
    return Part(
        (*into, Linear(q, hidden, "mixed" if gated or eager else "", (output,))),
        other=("q" in biases) * (q * (1 + gated) + 2 * kv)
        + ("o" in biases) * hidden
        + {"head": 2 * size, "whole": q + kv}.get(normed, 0)
        + heads * sinks,
        norms=norms,
        # Queries, and the output with the logarithms of its sums.
        half=q if eager else (2 + gated) * q,
        single=heads * (1 + sinks),
        keys=2 * kv * (groups if eager else 1),
        score_bytes=heads * (8 if capped else 2 if sinks else 0),
        window=window,
        groups=groups,
        cached=2 * kv,
    )


def latent_attention(
    hidden: int, heads: int, plain: int, rotated: int, value: int, q_rank: int | None, rank: int, *, biased: bool
) -> Part:
    """Attention whose keys and values come from one narrow vector per token (MLA, arXiv:2405.04434)."""
    q, kv = heads * (plain + rotated), heads * (plain + value)
    if q_rank:
        into = [Linear(hidden, q_rank, "hidden", ("q_a_proj",)), Linear(q_rank, q, "q", ("q_b_proj",))]
    else:
        into = [Linear(hidden, q, "hidden", ("q_proj",))]
    return Part(
        (
            *into,
            Linear(hidden, rank + rotated, "hidden", ("kv_a_proj_with_mqa",)),
            Linear(rank, kv, "kv", ("kv_b_proj",)),
            Linear(heads * value, hidden, "", ("o_proj",)),
        ),
        other=(q_rank or 0) + rank + biased * ((q_rank or 0) + rank + rotated + hidden),
        norms=tuple((size, 1) for size in (q_rank, rank) if size),
        half=q + heads * value,
        single=heads,
        keys=q + heads * value,
        cached=q + heads * value,
        latent=rank + rotated,
    )


def delta_rule(
    linear: tuple[Linear, ...],
    keys: tuple[int, int],
    values: tuple[int, int],
    kernel: int,
    *,
    by_dimension: bool = False,
) -> Part:
    """Gated delta rule (arXiv:2412.06464) with this number and size of keys and values, or with one decay per dimension
    of a key (KDA, arXiv:2510.26692)."""
    (key_heads, k), (heads, v), c = keys, values, DELTA_CHUNK
    convolved, out = 2 * key_heads * k + heads * v, heads * v
    kept = heads * (8 * k + 3 * v + 5 * c + k * v / c + 9)
    if by_dimension:
        kept = heads * (17 * k + 3 * v + 2.5 * c + k * v / c + 3 * c * k + c * c / 3)
    return Part(
        linear,
        other=convolved * kernel + (heads + heads * k if by_dimension else 2 * heads) + v,
        half=2 * convolved + heads + 2 * out,
        single=kept + 3 * out + heads,
        chunk=c,
        is_recurrent=True,
        recurred=kept / (2 if by_dimension else 4),
        convolved=convolved * kernel,
        state=heads * k * v,
    )


def mamba2(
    hidden: int,
    heads: int,
    size: int,
    groups: int,
    state: int,
    kernel: int,
    chunk: int,
    *,
    normed: bool,
    biases: tuple[bool, bool, bool],
    in_float: bool,
) -> Part:
    """State-space layer with one decay per head (arXiv:2405.21060). `biases`: of its input, convolution and output."""
    inner = heads * size
    convolved = inner + 2 * groups * state
    projected = inner + convolved + heads
    half = projected + convolved + 2 * heads + inner * (not normed)
    kept = heads * (5 * size + 5 * state + 3 * chunk + 2 * size * state / chunk + 4)
    return Part(
        (Linear(hidden, projected, "hidden", ("in_proj",)), Linear(inner, hidden, "mixed", ("out_proj",))),
        other=convolved * (kernel + biases[1]) + 3 * heads + inner * normed + projected * biases[0] + hidden * biases[2],
        half=half * (not in_float),
        single=kept + inner * (5 if normed else 1) + normed + half * in_float,
        chunk=chunk,
        is_recurrent=True,
        recurred=kept / 4,
        convolved=convolved * kernel,
        state=inner * state,
    )


def mamba(hidden: int, inner: int, rank: int, state: int, kernel: int, *, biased: bool, conv_biased: bool) -> Part:
    """Selective state space with one decay per channel (arXiv:2312.00752), with Jamba's norms."""
    return Part(
        (
            Linear(hidden, 2 * inner, "hidden", ("in_proj",)),
            Linear(inner, rank + 2 * state, "convolved", ("x_proj",)),
            Linear(rank, inner, "rank", ("dt_proj",)),
            Linear(inner, hidden, "mixed", ("out_proj",)),
        ),
        other=inner * (kernel + conv_biased + state + 2) + rank + 2 * state + biased * (2 * inner + hidden),
        norms=((rank, 1), (state, 1), (state, 1)),
        half=6 * inner + inner * state,
        single=inner * (3 * state + 2) + state,
        is_recurrent=True,
        recurred=4 * inner * state,
        convolved=inner * kernel,
        state=inner * state,
    )


def lightning(hidden: int, heads: int, size: int, block: int) -> Part:
    """Linear attention in blocks (arXiv:2401.04658), as MiniMax has it."""
    q = heads * size
    return Part(
        (
            Linear(hidden, 3 * q, "hidden", ("qkv_proj",)),
            Linear(hidden, q, "hidden", ("output_gate",)),
            Linear(q, hidden, "mixed", ("out_proj",)),
        ),
        other=q,
        norms=((q, 1),),
        half=11 * q + heads * block + q * size / block,
        chunk=block,
        is_recurrent=True,
        state=q * size,
    )


def short_convolution(hidden: int, kernel: int, *, biased: bool) -> Part:
    return Part(
        (Linear(hidden, 3 * hidden, "hidden", ("in_proj",)), Linear(hidden, hidden, "mixed", ("out_proj",))),
        other=hidden * kernel + biased * 5 * hidden,
        half=5 * hidden,
        is_recurrent=True,
        convolved=hidden * kernel,
    )


def mlp(
    hidden: int,
    size: int,
    names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    *,
    biased: bool = False,
    adapted: bool = True,
) -> Part:
    """MLP. `names`: of its projections; "up_proj" alone in front of the last has no gate, another one has both."""
    *first, last = names
    gates = 2 if len(first) == 2 or first[0] != "up_proj" else 1
    each = gates * size // len(first)
    into = [Linear(hidden, each, "rested", (name,) * adapted) for name in first]
    return Part(
        (*into, Linear(size, hidden, "product", (last,) * adapted)),
        other=biased * (gates * size + hidden),
        half=(2 * gates - 1) * size,
        widest=size,
    )


def experts(
    hidden: int,
    size: int,
    number: int,
    taken: int,
    names: Sequence[tuple[str, ...]],
    *,
    router: tuple[str, ...] = (),
    in_float: bool = False,
    biased: bool = False,
    gated: bool = True,
) -> Part:
    """Mixture of experts. `names`: of both projections, by which LoRA adapts them. `in_float`: its router computes in
    float32. `biased`: as gpt-oss has it, with a cap on what is multiplied."""
    gates = 1 + gated
    both = [names[0], names[1]] if names else [(), ()]
    own = gates * size + hidden  # of biases
    return Part(
        (
            Linear(hidden, gates * size, "taken", both[0], number, taken),
            Linear(size, hidden, "weighted", both[1], number, taken),
            Linear(hidden, number, "" if in_float else "rested", router),
        ),
        other=biased * (number * own + number),
        idle=biased * (number - taken) * own,
        half=taken * ((2 * gates - 1 + 3 * biased) * size + hidden),
        single=(2 if in_float else 1) * number + 12 * taken + in_float * hidden,
        widest=taken * (size + hidden / 2),
    )
