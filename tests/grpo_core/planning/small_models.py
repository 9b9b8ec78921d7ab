"""Small configurations of the families whose memory is forecast, with sizes that differ from each other."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING

SIZES = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TAKEN = {"num_experts_per_tok": 2}
EXPERTS = {**TAKEN, "moe_intermediate_size": 40}
SHARED = {"num_experts": 8, **EXPERTS, "shared_expert_intermediate_size": 56}
ROUTED = {"n_routed_experts": 8, **EXPERTS, "topk_group": 1}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
DELTA |= {"linear_value_head_dim": 24, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
LATENT = {"kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "num_key_value_heads": 4}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 24, "mamba_n_groups": 2, "mamba_chunk_size": 32}
WINDOWED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 32},
    "ministral": WINDOWED,
    "granite": {"logits_scaling": 1.0},
    "smollm3": {},
    "qwen2": {},
    "qwen2_moe": SHARED,
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"num_experts": 8, **EXPERTS, "mlp_only_layers": [0]},
    "qwen3_next": {**DELTA, **SHARED, "head_dim": 32},
    "qwen3_5_text": {**DELTA, "head_dim": 32},
    "qwen3_5_moe_text": {**DELTA, **SHARED, "head_dim": 32},
    "gpt_oss": {"num_local_experts": 8, **TAKEN, **WINDOWED},
    "gemma2": {"head_dim": 32},
    "gemma3_text": WINDOWED,
    "phi3": {},
    "olmo2": {},
    "olmo3": {**WINDOWED, "head_dim": 16},
    "olmoe": {"num_experts": 8, **TAKEN},
    "olmo_hybrid": {**DELTA, "linear_num_key_heads": 4},
    "granitemoehybrid": {
        **MAMBA,
        **TAKEN,
        "num_local_experts": 8,
        "shared_intermediate_size": 56,
        "layer_types": ["mamba", "mamba", "mamba", "attention"],
    },
    "glm4": {"head_dim": 32, "attention_bias": True},
    "glm4_moe": {**ROUTED, "head_dim": 32, "first_k_dense_replace": 1, "n_group": 2, "use_qk_norm": True},
    "deepseek_v3": {**ROUTED, **LATENT, "q_lora_rank": 24, "first_k_dense_replace": 1, "n_group": 2},
    "mixtral": {"num_local_experts": 8},
    "minimax_m2": {"num_local_experts": 8, **TAKEN, "head_dim": 32},
    "minimax": {"num_local_experts": 8, "layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 32},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},
    "bamba": {**MAMBA, "attn_layer_indices": [2]},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        **ROUTED,
        "n_group": 1,
        "moe_shared_expert_intermediate_size": 56,
        "head_dim": 32,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 24,
        "n_groups": 2,
        "chunk_size": 32,
    },
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 24,
        "n_groups": 2,
        "chunk_size": 32,
        "residual_in_fp32": False,
    },
    "kimi_linear": {
        **LATENT,
        **EXPERTS,
        "num_local_experts": 8,
        "layer_types": DELTA["layer_types"],
        "n_group": 1,
        "topk_group": 1,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
    },
    "jamba": {
        "num_experts": 8,
        **TAKEN,
        "attn_layer_period": 4,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 12,
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "exaone4": {**WINDOWED, "head_dim": 16},
    "ernie4_5": {"head_dim": 32, "use_bias": True},
    "cohere2": WINDOWED,
}


def small_config(family: str, **changes: Any) -> Any:
    """A key whose change is None is left out."""
    values = {**SIZES, **MODELS[family], **changes}
    return CONFIG_MAPPING[family](**{key: value for key, value in values.items() if value is not None})
