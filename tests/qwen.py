"""config.json of the Qwen2.5 models and of Qwen3.5-0.8B, as far as forecasts read it, the sizes that follow, and runs
planned with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from grpo_core.config.run import RunConfig
from grpo_core.config.teacher import loaded_teachers
from grpo_core.planning.hardware import Gpu
from grpo_core.planning.memory import PlannedRun
from grpo_core.planning.plan import make_plan, plan_inputs
from grpo_core.planning.shapes import ModelShape, PromptLengths, model_shape


def _config(hidden: int, layers: int, heads: int, intermediate: int, *, small: bool = False) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": {896: 2, 1536: 2, 2048: 2, 3584: 4}.get(hidden, 8),
        "intermediate_size": intermediate,
        "vocab_size": 151_936 if small else 152_064,
        "tie_word_embeddings": small,
    }


# A model that can be built here, with several layers, heads and groups of heads.
SIZES = {
    "vocab_size": 2000,
    "hidden_size": 256,
    "intermediate_size": 700,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}

# Three layers of gated delta rule to one that attends.
QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "full_attention_interval": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 128),
    "linear_conv_kernel_dim": 4,
    "intermediate_size": 3584,
    "vocab_size": 248_320,
    "tie_word_embeddings": True,
}

QWEN = {
    "0.5B": _config(896, 24, 14, 4864, small=True),
    "0.8B": {"model_type": "qwen3_5", "text_config": QWEN3_5, "tie_word_embeddings": True},
    "1.5B": _config(1536, 28, 12, 8960, small=True),
    "3B": _config(2048, 36, 16, 11008, small=True),
    "7B": _config(3584, 28, 28, 18944),
    "14B": _config(5120, 48, 40, 13824),
    "32B": _config(5120, 64, 40, 27648),
    "72B": _config(8192, 80, 64, 29568),
}


def qwen(size: str) -> ModelShape:
    """Sizes of the Qwen of this size ("7B")."""
    return model_shape(QWEN[size])


def planned(
    config: RunConfig, shape: ModelShape | str, lengths: PromptLengths, gpu: Gpu, *teachers: ModelShape
) -> PlannedRun:
    """Run with 20,000 prompts of each source, of a model of this shape or of the Qwen of this size."""
    shape = qwen(shape) if isinstance(shape, str) else shape
    prompts = [20_000] * max(len(config.data.sources), 1)
    by_name = dict(zip((it.name_or_path for it in loaded_teachers(config).values()), teachers, strict=False))
    return PlannedRun(config, make_plan(plan_inputs(config, *prompts)), shape, lengths, gpu, by_name)


def with_tokens(run: PlannedRun, tokens: int | None) -> PlannedRun:
    """The run with so many tokens per pass."""
    return replace(run, plan=replace(run.plan, max_tokens_per_pass=tokens))
