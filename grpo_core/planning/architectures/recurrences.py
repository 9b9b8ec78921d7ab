"""Recurrences and convolutions of hybrid models, from their configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_core.planning.architectures.parts import Linear, Part

Config = Mapping[str, Any]
DELTA_CHUNK = 64  # tokens


def qwen3_5(c: Config) -> Part:
    key, value, heads = _delta_sizes(c)
    into = {"in_proj_qkv": 2 * key + value, "in_proj_z": value, "in_proj_b": heads, "in_proj_a": heads}
    return _gated_delta(c, _around(c, value, into))


def qwen3_next(c: Config) -> Part:
    key, value, heads = _delta_sizes(c)
    return _gated_delta(c, _around(c, value, {"in_proj_qkvz": 2 * (key + value), "in_proj_ba": 2 * heads}))


def olmo_hybrid(c: Config) -> Part:
    key, value, heads = _delta_sizes(c)
    into = {"q_proj": key, "k_proj": key, "v_proj": value, "a_proj": heads, "b_proj": heads, "g_proj": value}
    return _gated_delta(c, _around(c, value, into, "o_proj"))


def _around(c: Config, inner: int, projections: Mapping[str, int], output: str = "out_proj") -> tuple[Linear, ...]:
    """The linear layers in front of a recurrence, and the one behind it."""
    into = (Linear(c["hidden_size"], size, "hidden", (name,)) for name, size in projections.items())
    return (*into, Linear(inner, c["hidden_size"], "mixed", (output,)))


def _delta_sizes(c: Config) -> tuple[int, int, int]:
    key, heads = c["linear_num_key_heads"] * c["linear_key_head_dim"], c["linear_num_value_heads"]
    return key, heads * c["linear_value_head_dim"], heads


def _gated_delta(c: Config, linear: tuple[Linear, ...]) -> Part:
    """Gated delta rule (arXiv:2412.06464)."""
    (key, value, heads), k, v, n = _delta_sizes(c), c["linear_key_head_dim"], c["linear_value_head_dim"], DELTA_CHUNK
    kept = heads * (8 * k + 3 * v + 5 * n + k * v / n + 9)
    return _delta(linear, 2 * key + value, c["linear_conv_kernel_dim"], (heads, k, v), 2 * heads, kept, kept / 4)


def kimi(c: Config) -> Part:
    """Delta rule with a decay per dimension of a key (arXiv:2510.26692)."""
    own, n = c.get("linear_attn_config") or {}, DELTA_CHUNK
    heads, k = own.get("num_heads") or c["linear_num_heads"], own.get("head_dim") or c["linear_head_dim"]
    kernel = own.get("short_conv_kernel_size") or c["linear_conv_kernel_dim"]
    into = dict.fromkeys(("q_proj", "k_proj", "v_proj"), heads * k) | {"f_a_proj": k, "g_a_proj": k, "b_proj": heads}
    narrow = (Linear(k, heads * k, name, (name,)) for name in ("f_b_proj", "g_b_proj"))
    linear = (*_around(c, heads * k, into, "o_proj"), *narrow)
    kept = heads * (20 * k + 2.5 * n + k * k / n + 3 * n * k + n * n / 3)
    return _delta(linear, 3 * heads * k, kernel, (heads, k, k), heads * (1 + k), kept, kept / 2)


def _delta(
    linear: tuple[Linear, ...],
    channels: int,  # of its convolution
    kernel: int,
    sizes: tuple[int, int, int],  # heads, and of each: keys, values
    decays: int,  # parameters
    kept: float,
    recurred: float,
) -> Part:
    heads, k, v = sizes
    return Part(
        linear,
        other=channels * kernel + decays + v,
        half=2 * channels + heads + 2 * heads * v,
        single=kept + heads * (3 * v + 1),
        recurred=recurred,
        chunk=DELTA_CHUNK,
        convolved=channels * kernel,
        state=heads * k * v,
    )


def mamba2(c: Config) -> Part:
    """State-space layer with a decay per head (arXiv:2405.21060)."""

    def given(*names: str) -> Any:
        return c[next((name for name in names if c.get(name) is not None), names[0])]

    h, heads = c["hidden_size"], given("mamba_n_heads", "mamba_num_heads", "num_heads")
    size, groups = given("mamba_d_head", "mamba_head_dim", "head_dim"), given("mamba_n_groups", "n_groups")
    inner = c["mamba_expand"] * h if size == "auto" else heads * size
    size, state, n = (
        inner // heads,
        given("mamba_d_state", "ssm_state_size", "state_size"),
        given("mamba_chunk_size", "chunk_size"),
    )
    kernel, biased = given("mamba_d_conv", "conv_kernel"), c.get("use_bias", c.get("mamba_proj_bias", False))
    conv_biased, normed = c.get("use_conv_bias", c.get("mamba_conv_bias", True)), c.get("mamba_rms_norm", True)
    channels = inner + 2 * groups * state
    projected = inner + channels + heads
    kept = heads * (5 * size + 5 * state + 3 * n + 2 * size * state / n + 4)
    half, in_float = projected + channels + 2 * heads + inner * (not normed), "ssm_multipliers" in c
    return Part(
        _around(c, inner, {"in_proj": projected}),
        other=channels * (kernel + conv_biased)
        + 3 * heads
        + inner * normed
        + projected * biased
        + h * c.get("projectors_bias", biased),
        half=half * (not in_float),  # Falcon's multipliers stay float32
        single=kept + inner * (5 if normed else 1) + normed + half * in_float,
        recurred=kept / 4,
        chunk=n,
        convolved=channels * kernel,
        state=inner * state,
    )


def mamba(c: Config) -> Part:
    """State-space layer with a decay per channel (arXiv:2312.00752) and norms, as Jamba has it."""
    h, inner, n = c["hidden_size"], c["mamba_expand"] * c["hidden_size"], c["mamba_d_state"]
    rank = -(-h // 16) if c["mamba_dt_rank"] == "auto" else c["mamba_dt_rank"]
    kernel, biased = c["mamba_d_conv"], c.get("mamba_proj_bias", False)
    narrow = Linear(inner, rank + 2 * n, "convolved", ("x_proj",)), Linear(rank, inner, "rank", ("dt_proj",))
    return Part(
        (*_around(c, inner, {"in_proj": 2 * inner}), *narrow),
        other=inner * (kernel + c.get("mamba_conv_bias", True) + n + 2) + rank + 2 * n + biased * (2 * inner + h),
        norms=((rank, 1), (n, 1), (n, 1)),
        half=inner * (6 + n),
        single=inner * (3 * n + 2) + n,
        recurred=4 * inner * n,
        chunk=1,
        convolved=inner * kernel,
        state=inner * n,
    )


def lightning(c: Config) -> Part:
    """Linear attention in blocks (arXiv:2401.04658), as MiniMax has it."""
    heads, n = c["num_attention_heads"], c["block_size"]
    size = c.get("head_dim") or c["hidden_size"] // heads
    inner = heads * size
    kept = 11 * inner + heads * n + inner * size / n
    linear = _around(c, inner, {"qkv_proj": 3 * inner, "output_gate": inner})
    return Part(linear, other=inner, norms=((inner, 1),), half=kept, chunk=n, state=inner * size)


def convolution(c: Config) -> Part:
    h, kernel, biased = c["hidden_size"], c["conv_L_cache"], c.get("conv_bias", False)
    linear = _around(c, h, {"in_proj": 3 * h})
    return Part(linear, other=h * (kernel + 5 * biased), half=5 * h, chunk=1, convolved=h * kernel)
