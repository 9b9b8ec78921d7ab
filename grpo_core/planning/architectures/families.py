"""Layers of a model from its config.json, for the families of FAMILIES, which have transformers' names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from grpo_core.planning.architectures import recurrences
from grpo_core.planning.architectures.parts import ForecastError, Linear, Part
from grpo_core.planning.architectures.recurrences import Config

# Names by which peft finds both tensors of fused experts, and their router.
AS_QWEN = (("gate_proj", "up_proj"), ("down_proj",), ("gate",))  # and then no other MLPs that have these names
AS_MIXTRAL = (("w1", "w3"), ("w2",), ("gate",))
KINDS = {"full_attention": "full", "attention": "full", "*": "full", "sliding_attention": "window"}
KINDS |= {"mlp": "mlp", "-": "mlp", "moe": "moe", "E": "moe"}
KINDS |= dict.fromkeys(("linear_attention", "mamba", "M", "conv", "hybrid"), "recurrent")


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
    gated: bool = False  # attention's output
    fused: bool = False  # queries, keys and values
    sinks: bool = False
    output: str = "o_proj"
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # up_proj without gate, or both in one
    adapted: tuple[tuple[str, ...], ...] = ((), (), ())  # experts and router, by LoRA
    defaults: tuple[tuple[str, Any], ...] = ()  # of keys that configurations leave out


LLAMA, TIED = Family(), (("tie_word_embeddings", True),)
QWEN2 = Family(biases="qkv", biased=("qkv_bias", True))
QWEN3_5 = Family(normed="head", float_norms=1, interval=4, recurrence=recurrences.qwen3_5, gated=True)
GEMMA = Family(norms=4, float_norms=1, interval=2, defaults=(*TIED, ("head_dim", 256), ("sliding_window", 4096)))
GEMMA3 = (*GEMMA.defaults, ("num_attention_heads", 8), ("num_key_value_heads", 4), ("vocab_size", 262208))
OLMO = Family(normed="whole", float_norms=1, interval=4)
GLM = Family(biases="qkv", biased=("attention_bias", True), norms=4, mlp=("gate_up_proj", "down_proj"))
FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "ministral": LLAMA,
    "granite": LLAMA,
    "smollm3": Family(defaults=TIED),
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2,
    "qwen3": Family(normed="head"),
    "qwen3_moe": Family(normed="head", adapted=AS_QWEN),
    "qwen3_next": replace(QWEN3_5, recurrence=recurrences.qwen3_next, adapted=AS_QWEN),
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5,
    "gpt_oss": Family(biased=("attention_bias", True), float_norms=1, interval=2, sinks=True),
    "gemma2": GEMMA,
    "gemma3_text": replace(GEMMA, normed="head", interval=6, defaults=GEMMA3),
    "phi3": Family(fused=True, mlp=("gate_up_proj", "down_proj")),
    "olmo2": replace(OLMO, interval=1),
    "olmo3": OLMO,
    "olmoe": Family(normed="whole", adapted=AS_QWEN),
    "olmo_hybrid": replace(OLMO, recurrence=recurrences.olmo_hybrid),
    "granitemoehybrid": Family(recurrence=recurrences.mamba2, mlp=("input_linear", "output_linear")),
    "glm4": GLM,
    "glm4_moe": Family(biases="qkv", adapted=AS_QWEN),
    "deepseek_v3": Family(adapted=AS_QWEN),
    "mixtral": Family(adapted=AS_MIXTRAL),
    "minimax_m2": Family(normed="whole", adapted=AS_MIXTRAL),
    "minimax": Family(recurrence=recurrences.lightning, adapted=AS_MIXTRAL, interval=2),
    "falcon_h1": Family(recurrence=recurrences.mamba2, beside=True),
    "bamba": Family(recurrence=recurrences.mamba2),
    "nemotron_h": Family("", recurrence=recurrences.mamba2, norms=1, float_norms=1, mlp=("up_proj", "down_proj")),
    "mamba2": Family(recurrence=recurrences.mamba2, norms=1),
    "kimi_linear": Family(recurrence=recurrences.kimi),
    "jamba": Family(recurrence=recurrences.mamba, adapted=((), (), ("router",))),
    "lfm2": Family(
        "", normed="head", recurrence=recurrences.convolution, output="out_proj", mlp=("w1", "w3", "w2"), defaults=TIED
    ),
    "exaone4": Family(normed="head", interval=4),
    "ernie4_5": Family(biased=("use_bias", False), defaults=TIED),
    "cohere2": Family(norms=1, float_norms=2, interval=4, defaults=TIED),
}
FUSED = ("gpt_oss", "granitemoehybrid")  # whose checkpoints have all experts of a layer in one tensor


def layers(family: str, c: Config) -> list[tuple[Part, ...]]:
    """The parts of each layer. `c`: with the family's defaults."""
    it, h, found = FAMILIES[family], c["hidden_size"], []
    alone = it.norms == 1 and it.recurrence  # a layer has one part
    for index, kind in enumerate(_kinds(it, c)):
        layer = [Part(other=it.norms * h, norms=((h, 1),) * it.norms)]
        if kind in ("full", "window") or it.beside:
            layer.append(_attention(it, c, c.get("sliding_window") if kind == "window" else None))
        if it.recurrence and (kind == "recurrent" or it.beside):
            layer.append(it.recurrence(c))
        if kind == "moe" or (not alone and _is_mixture(c, index)):
            layer += _mixture(it, c)
        elif kind == "mlp" or not alone:
            layer.append(_mlp(it, c, c.get("shared_intermediate_size") or _mlp_size(c)))
        found.append(tuple(layer))
    return found


def _kinds(it: Family, c: Config) -> list[str]:
    """Kind of each layer: "full", "window" or "recurrent"; "mlp" or "moe", where a layer has one part."""
    if c.get("moe_latent_size"):
        raise ForecastError("moe_latent_size: experts between narrower layers are not known")
    if types := c.get("layer_types") or c.get("layers_block_type") or c.get("hybrid_override_pattern"):
        known = [kind for kind, means in KINDS.items() if means != "recurrent" or it.recurrence]
        if other := sorted({*types} - {*known}):
            raise ForecastError(f"layers of the kind {other[0]!r} are not known in this family")
        return [KINDS[each] for each in types]
    every, other = range(c["num_hidden_layers"]), "recurrent" if it.recurrence else "window"
    attending = c.get("attn_layer_indices") or c.get("full_attn_idxs")
    if own := c.get("linear_attn_config"):
        attending = [layer - 1 for layer in own["full_attn_layers"]]
    if period := c.get("attn_layer_period"):
        attending = [layer for layer in every if layer % period == c["attn_layer_offset"]]
    if it.interval > 1:
        interval = c.get("full_attention_interval") or c.get("sliding_window_pattern") or it.interval
        attending = [layer for layer in every if (layer + 1) % interval == 0]
    if attending is None and not it.recurrence:
        windowed = c.get("sliding_window") and c.get("use_sliding_window", "max_window_layers" not in c)
        attending = [] if windowed else every
    return ["full" if layer in (attending or ()) else other for layer in every]


def _attention(it: Family, c: Config, window: int | None) -> Part:
    h, heads, biased = c["hidden_size"], c["num_attention_heads"], c.get(*it.biased)
    if "kv_lora_rank" in c:
        return _latent_attention(c, biased)
    groups, size = heads // (c.get("num_key_value_heads") or heads), c.get("head_dim") or h // heads
    q, kv, capped = heads * size, heads // groups * size, bool(c.get("attn_logit_softcapping"))
    projected = {"q_proj": q * (1 + it.gated), "k_proj": kv, "v_proj": kv}
    into = [Linear(h, out, "hidden", (name,)) for name, out in projected.items()]
    if it.fused:
        into = [Linear(h, q + 2 * kv, "hidden", ("qkv_proj",))]
    normed = it.normed or "head" * c.get("use_qk_norm", False)
    other = {"head": 2 * size, "whole": q + kv, "": 0}[normed] + it.sinks * heads
    if biased:
        other += ("q" in it.biases) * sum(projected.values()) + ("o" in it.biases) * h
    eager = it.sinks or capped  # fused attention, which gives logarithms of sums, has neither
    return Part(
        (*into, Linear(q, h, "mixed" * (it.gated or eager), (it.output,))),
        other=other,
        norms={"head": ((q, heads), (kv, heads // groups)), "whole": ((q, 1), (kv, 1)), "": ()}[normed],
        half=q * (1 if eager else 2 + it.gated),
        single=heads * (1 + it.sinks),
        keys=2 * kv * (groups if eager else 1),
        scored=2 * q,
        score_bytes=heads * (8 if capped else 2 * it.sinks),  # in bfloat16
        window=window,
        cached=2 * kv,
    )


def _latent_attention(c: Config, biased: bool) -> Part:
    """Attention whose keys and values come from one narrow vector per token (MLA, arXiv:2405.04434)."""
    h, heads, q_rank, rank = c["hidden_size"], c["num_attention_heads"], c.get("q_lora_rank") or 0, c["kv_lora_rank"]
    plain, rotated, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    q, out = heads * (plain + rotated), heads * value
    into = [Linear(h, q, "hidden", ("q_proj",))]
    if q_rank:
        into = [Linear(h, q_rank, "hidden", ("q_a_proj",)), Linear(q_rank, q, "narrow q", ("q_b_proj",))]
    into.append(Linear(h, rank + rotated, "hidden", ("kv_a_proj_with_mqa",)))
    into.append(Linear(rank, heads * (plain + value), "narrow", ("kv_b_proj",)))
    return Part(
        (*into, Linear(out, h, "", ("o_proj",))),
        other=q_rank + rank + biased * (q_rank + rank + rotated + h),
        norms=((q_rank, 1), (rank, 1)),
        half=q + out,
        single=heads,
        keys=q + out,
        scored=q + out,
        cached=rank + rotated,
    )


def _is_mixture(c: Config, layer: int) -> bool:
    if _experts(c) < 2:
        return False
    if kinds := c.get("mlp_layer_types"):
        return kinds[layer] == "sparse"
    if period := c.get("expert_layer_period"):
        return layer % period == c["expert_layer_offset"]
    dense, every = c.get("mlp_only_layers") or [], c.get("decoder_sparse_step") or 1
    return layer not in dense and (layer + 1) % every == 0 and layer >= c.get("first_k_dense_replace", 0)


def _experts(c: Config) -> int:
    return next((c[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if c.get(key)), 0)


def _mlp_size(c: Config) -> int:
    size = c.get("block_ff_dim") or c["intermediate_size"]
    if c.get("block_auto_adjust_ff_dim"):  # LFM2
        size = int(c.get("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
        size = -(-size // c["block_multiple_of"]) * c["block_multiple_of"]
    return size


def _mlp(it: Family, c: Config, size: int) -> Part:
    h, (*first, last), plain = c["hidden_size"], it.mlp, it.mlp[0] == "up_proj"
    gates, adapted = 1 if plain else 2, it.adapted != AS_QWEN
    into = (Linear(h, gates * size // len(first), "rested", (name,) * adapted) for name in first)
    biased = c.get("mlp_bias", "use_bias" in it.biased and c.get("use_bias", False))
    linear = (*into, Linear(size, h, "product", (last,) * adapted))
    return Part(linear, other=biased * (gates * size + h), half=(2 * gates - 1) * size, widest=size)


def _mixture(it: Family, c: Config) -> list[Part]:
    """Experts, and the MLP that all tokens take beside them."""
    h, size, number = c["hidden_size"], c.get("moe_intermediate_size") or c["intermediate_size"], _experts(c)
    taken = c["num_experts_per_tok" if "num_experts_per_tok" in c else "num_experts_per_token"]
    gates, own = 1 if it.mlp[0] == "up_proj" else 2, 2 * size + h  # biases of gpt-oss, whose products have a cap
    in_float = "topk_group" in c  # its router computes in float32
    both, down, router = it.adapted
    found = [
        Part(
            (
                Linear(h, gates * size, "taken", both, number, taken),
                Linear(size, h, "weighted", down, number, taken),
                Linear(h, number, "" if in_float else "rested", router),
            ),
            other=it.sinks * (number * own + number),
            idle=it.sinks * (number - taken) * own,
            half=taken * ((2 * gates - 1 + 3 * it.sinks) * size + h),
            single=(1 + in_float) * number + 12 * taken + in_float * h,
            widest=taken * (size + h / 2),
        )
    ]
    count = c.get("n_shared_experts") or c.get("num_shared_experts") or 0
    keys = ("shared_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
    if shared := next((c[key] for key in keys if c.get(key)), count * size):
        found.append(_mlp(it, c, shared))
    if "shared_expert_intermediate_size" in c:
        found.append(Part((Linear(h, 1, "rested", ("shared_expert_gate",)),), half=h + 1))
    return found
