"""Layers of a model from its config.json, for the families of FAMILIES, which have transformers' names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_core.planning.architectures import parts
from grpo_core.planning.architectures.parts import Linear, Part

Config = Mapping[str, Any]
# Names by which peft finds fused experts; of a family that has them, it then finds other MLPs of these names no more.
AS_QWEN, AS_MIXTRAL = (("gate_proj", "up_proj"), ("down_proj",)), (("w1", "w3"), ("w2",))
KINDS = {"full_attention": "full", "attention": "full", "*": "full", "sliding_attention": "window"}
KINDS |= {"mlp": "mlp", "-": "mlp", "moe": "moe", "E": "moe"}  # others have a recurrence or convolution


@dataclass(frozen=True)
class Family:
    """What distinguishes a family beside the values of its configuration."""

    biases: str = "qkvo"  # that biased attention has
    biased: tuple[str, bool] = ("attention_bias", False)  # key of the configuration, and its default
    normed: str = ""  # queries and keys, each "head" or the "whole"
    norms: int = 2  # per layer
    float_norms: int = 0  # float32 numbers that a norm keeps of its result; 0: one in the precision of the pass
    interval: int = 1  # where layer_types are not given: each layer of this number attends to all
    recurrence: Callable[[Config], Part] | None = None
    beside: bool = False  # a layer has attention and the recurrence
    alone: bool = False  # a layer has one part
    latent: bool = False
    gated: bool = False  # attention's output
    fused: bool = False  # queries, keys and values
    sinks: bool = False
    output: str = "o_proj"
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    shared: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # of what all tokens take beside experts
    adapted: tuple[tuple[str, ...], ...] = ()  # experts, by LoRA
    router: tuple[str, ...] = ()
    float_router: bool = False
    defaults: tuple[tuple[str, Any], ...] = ()  # of keys that configurations leave out


def _delta(c: Config) -> tuple[int, int, int, int]:
    names = ("linear_num_key_heads", "linear_key_head_dim", "linear_num_value_heads", "linear_value_head_dim")
    key_heads, k, heads, v = (c[name] for name in names)
    return key_heads, k, heads, v


def _gated_delta(c: Config, *projections: tuple[str, int], output: str = "out_proj") -> Part:
    key_heads, k, heads, v = _delta(c)
    linear = [Linear(c["hidden_size"], size, "hidden", (name,)) for name, size in projections]
    linear.append(Linear(heads * v, c["hidden_size"], "mixed", (output,)))
    return parts.delta_rule(tuple(linear), (key_heads, k), (heads, v), c["linear_conv_kernel_dim"])


def _qwen3_5(c: Config) -> Part:
    key_heads, k, heads, v = _delta(c)
    qkv = ("in_proj_qkv", 2 * key_heads * k + heads * v)
    return _gated_delta(c, qkv, ("in_proj_z", heads * v), ("in_proj_b", heads), ("in_proj_a", heads))


def _qwen3_next(c: Config) -> Part:
    key_heads, k, heads, v = _delta(c)
    return _gated_delta(c, ("in_proj_qkvz", 2 * (key_heads * k + heads * v)), ("in_proj_ba", 2 * heads))


def _olmo_hybrid(c: Config) -> Part:
    key_heads, k, heads, v = _delta(c)
    keys = (("q_proj", key_heads * k), ("k_proj", key_heads * k), ("v_proj", heads * v))
    return _gated_delta(c, *keys, ("a_proj", heads), ("b_proj", heads), ("g_proj", heads * v), output="o_proj")


def _kimi(c: Config) -> Part:
    own = c.get("linear_attn_config") or {}
    h, heads = c["hidden_size"], own.get("num_heads") or c["linear_num_heads"]
    size = own.get("head_dim") or c["linear_head_dim"]
    inner, narrow = heads * size, ("f_a_proj", "g_a_proj")
    linear = [Linear(h, inner, "hidden", (name,)) for name in ("q_proj", "k_proj", "v_proj")]
    linear += [Linear(h, size, "hidden", (name,)) for name in narrow] + [Linear(h, heads, "hidden", ("b_proj",))]
    linear += [Linear(size, inner, name, (name.replace("a", "b"),)) for name in narrow]
    linear.append(Linear(inner, h, "mixed", ("o_proj",)))
    kernel = own.get("short_conv_kernel_size") or c["linear_conv_kernel_dim"]
    return parts.delta_rule(tuple(linear), (heads, size), (heads, size), kernel, by_dimension=True)


def _mamba2(c: Config) -> Part:
    h, heads = c["hidden_size"], c["mamba_n_heads"]
    inner = c.get("mamba_d_ssm") or c["mamba_expand"] * h
    biased = c.get("mamba_proj_bias", False)
    return parts.mamba2(
        *(h, heads, inner // heads, c["mamba_n_groups"], c["mamba_d_state"], c["mamba_d_conv"], c["mamba_chunk_size"]),
        normed=c.get("mamba_rms_norm", True),
        biases=(biased, c.get("mamba_conv_bias", True), c.get("projectors_bias", biased)),
        in_float="ssm_multipliers" in c,  # which stay float32
    )


def _plain_mamba2(c: Config) -> Part:
    heads, size = (c["num_heads"], c["head_dim"]) if "num_heads" in c else (c["mamba_num_heads"], c["mamba_head_dim"])
    state = c["state_size" if "state_size" in c else "ssm_state_size"]
    biased = c.get("use_bias", False)
    return parts.mamba2(
        *(c["hidden_size"], heads, size, c["n_groups"], state, c["conv_kernel"], c["chunk_size"]),
        normed=True,
        biases=(biased, c.get("use_conv_bias", True), biased),
        in_float=False,
    )


def _mamba(c: Config) -> Part:
    h, rank = c["hidden_size"], c["mamba_dt_rank"]
    return parts.mamba(
        *(h, c["mamba_expand"] * h, -(-h // 16) if rank == "auto" else rank, c["mamba_d_state"], c["mamba_d_conv"]),
        biased=c.get("mamba_proj_bias", False),
        conv_biased=c.get("mamba_conv_bias", True),
    )


def _lightning(c: Config) -> Part:
    heads = c["num_attention_heads"]
    return parts.lightning(c["hidden_size"], heads, c.get("head_dim") or c["hidden_size"] // heads, c["block_size"])


def _convolution(c: Config) -> Part:
    return parts.short_convolution(c["hidden_size"], c["conv_L_cache"], biased=c.get("conv_bias", False))


TIED = (("tie_word_embeddings", True),)
GEMMA = (*TIED, ("head_dim", 256), ("sliding_window", 4096), ("num_attention_heads", 8), ("num_key_value_heads", 4))
QWEN3_5 = Family(normed="head", float_norms=1, interval=4, recurrence=_qwen3_5, gated=True)
JAMBA = Family(recurrence=_mamba, router=("router",))
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "granite", "ministral"), Family()),
    "qwen2": Family(biases="qkv", biased=("qkv_bias", True)),
    "qwen2_moe": Family(biases="qkv", biased=("qkv_bias", True)),
    "qwen3": Family(normed="head"),
    "qwen3_moe": Family(normed="head", adapted=AS_QWEN, router=("gate",)),
    "qwen3_next": Family(
        **{**vars(QWEN3_5), "recurrence": _qwen3_next, "adapted": AS_QWEN, "router": ("gate",)}
    ),
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5,
    "gpt_oss": Family(biased=("attention_bias", True), float_norms=1, interval=2, sinks=True),
    "gemma2": Family(norms=4, float_norms=1, interval=2, defaults=GEMMA),
    "gemma3_text": Family(
        normed="head", norms=4, float_norms=1, interval=6, defaults=(*GEMMA, ("vocab_size", 262208))
    ),
    "phi3": Family(fused=True, mlp=("gate_up_proj", "down_proj")),
    "olmo2": Family(normed="whole", float_norms=1),
    "olmo3": Family(normed="whole", float_norms=1, interval=4),
    "olmo_hybrid": Family(normed="whole", float_norms=1, interval=4, recurrence=_olmo_hybrid),
    "olmoe": Family(normed="whole", adapted=AS_QWEN, router=("gate",)),
    "granitemoehybrid": Family(recurrence=_mamba2, shared=("input_linear", "output_linear")),
    "smollm3": Family(defaults=TIED),
    "glm4": Family(biases="qkv", biased=("attention_bias", True), norms=4, mlp=("gate_up_proj", "down_proj")),
    "glm4_moe": Family(biases="qkv", adapted=AS_QWEN, router=("gate",), float_router=True),
    "deepseek_v3": Family(latent=True, adapted=AS_QWEN, router=("gate",), float_router=True),
    "mixtral": Family(adapted=AS_MIXTRAL, router=("gate",)),
    "minimax": Family(recurrence=_lightning, adapted=AS_MIXTRAL, router=("gate",)),
    "minimax_m2": Family(normed="whole", adapted=AS_MIXTRAL, router=("gate",)),
    "falcon_h1": Family(recurrence=_mamba2, beside=True),
    "nemotron_h": Family(
        recurrence=_plain_mamba2, alone=True, norms=1, float_norms=1, float_router=True,
        mlp=("up_proj", "down_proj"), shared=("up_proj", "down_proj"),
    ),
    "jamba": JAMBA,
    "bamba": Family(recurrence=_mamba2),
    "mamba2": Family(recurrence=_plain_mamba2, alone=True, norms=1),
    "lfm2": Family(normed="head", recurrence=_convolution, output="out_proj", mlp=("w1", "w3", "w2"), defaults=TIED),
    "kimi_linear": Family(latent=True, recurrence=_kimi, float_router=True),
    "exaone4": Family(normed="head", interval=4),
    "ernie4_5": Family(biased=("use_bias", False), defaults=TIED),
    "cohere2": Family(norms=1, float_norms=2, interval=4, defaults=TIED),
}


def layers(family: str, c: Config) -> list[tuple[Part, ...]]:
    """The parts of each layer. `c`: with the family's defaults."""
    it, found = FAMILIES[family], []
    for index, kind in enumerate(_kinds(it, c)):
        layer = [parts.norm(c["hidden_size"], it.norms)]
        if kind in ("full", "window") or it.beside:
            layer.append(_attention(it, c, c.get("sliding_window") if kind == "window" else None))
        if it.recurrence and (kind == "recurrent" or it.beside):
            layer.append(it.recurrence(c))
        if not it.alone or kind in ("mlp", "moe"):
            layer += _mlps(it, c, kind == "moe" if it.alone else _is_mixture(c, index))
        found.append(tuple(layer))
    return found


def _kinds(it: Family, c: Config) -> list[str]:
    """Kind of each layer: "full", "window" or "recurrent"; "mlp" or "moe", where a layer has one part."""
    types = c.get("layer_types") or c.get("layers_block_type") or c.get("hybrid_override_pattern")
    if types:
        return [KINDS.get(each, "recurrent") for each in types]
    every, other = range(c["num_hidden_layers"]), "recurrent" if it.recurrence else "window"
    attending = c.get("attn_layer_indices") or c.get("full_attn_idxs")
    if own := c.get("linear_attn_config"):
        attending = [layer - 1 for layer in own["full_attn_layers"]]
    if period := c.get("attn_layer_period"):
        attending = [layer for layer in every if layer % period == c["attn_layer_offset"]]
    if attending is not None:
        return ["full" if layer in attending else "recurrent" for layer in every]
    if it.interval > 1:
        interval = c.get("full_attention_interval") or c.get("sliding_window_pattern") or it.interval
        return ["full" if (layer + 1) % interval == 0 else other for layer in every]
    windowed = c.get("sliding_window") and c.get("use_sliding_window", "max_window_layers" not in c)
    return ["recurrent" if it.recurrence else "window" if windowed else "full" for _ in every]


def _attention(it: Family, c: Config, window: int | None) -> Part:
    h, heads, biased = c["hidden_size"], c["num_attention_heads"], c.get(*it.biased)
    if it.latent:
        plain, rotated, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        ranks = c.get("q_lora_rank"), c["kv_lora_rank"]
        return parts.latent_attention(h, heads, plain, rotated, value, *ranks, biased=biased)
    return parts.attention(
        *(h, heads, heads // (c.get("num_key_value_heads") or heads), c.get("head_dim") or h // heads),
        window=window,
        biases=it.biases * biased,
        normed=it.normed or "head" * c.get("use_qk_norm", False),
        gated=it.gated,
        fused=it.fused,
        sinks=it.sinks,
        capped=bool(c.get("attn_logit_softcapping")),
        output=it.output,
    )


def _is_mixture(c: Config, layer: int) -> bool:
    number = _experts(c)
    if number < 2:
        return False
    if kinds := c.get("mlp_layer_types"):
        return kinds[layer] == "sparse"
    if period := c.get("expert_layer_period"):
        return layer % period == c["expert_layer_offset"]
    dense, every = c.get("mlp_only_layers") or [], c.get("decoder_sparse_step") or 1
    return layer not in dense and (layer + 1) % every == 0 and layer >= c.get("first_k_dense_replace", 0)


def _experts(c: Config) -> int:
    return next((c[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if c.get(key)), 0)


def _mlps(it: Family, c: Config, mixture: bool) -> list[Part]:
    """The MLP of a layer, or its experts with what all tokens take beside them."""
    h, size, adapted = c["hidden_size"], c.get("intermediate_size", 0), not it.adapted or it.adapted == AS_MIXTRAL
    biased = c.get("mlp_bias", c.get("use_bias", False) if it.biased[0] == "use_bias" else False)
    found = []
    shared = c.get("shared_intermediate_size") or c.get("shared_expert_intermediate_size", 0) * mixture
    if mixture:
        own = c.get("moe_intermediate_size") or size
        taken = c["num_experts_per_tok" if "num_experts_per_tok" in c else "num_experts_per_token"]
        found.append(
            parts.experts(
                *(h, own, _experts(c), taken, it.adapted),
                router=it.router,
                in_float=it.float_router,
                biased=it.sinks,
                gated=it.mlp[0] != "up_proj",
            )
        )
        number = c.get("n_shared_experts") or c.get("num_shared_experts") or 0
        shared = shared or c.get("moe_shared_expert_intermediate_size") or number * own
    elif "shared_intermediate_size" not in c:
        if c.get("block_auto_adjust_ff_dim"):  # LFM2's own rounding
            size = int(c.get("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
            size = -(-size // c["block_multiple_of"]) * c["block_multiple_of"]
        found.append(parts.mlp(h, size, it.mlp, biased=biased, adapted=adapted))
    if shared:
        found.append(parts.mlp(h, shared, it.shared, biased=biased, adapted=adapted))
    if shared and "shared_expert_intermediate_size" in c:
        found.append(Part((Linear(h, 1, "rested", ("shared_expert_gate",)),), half=h + 1))
    return found
