"""The cases of parity_trl.py: settings by name, in keys that both sides have, and the inputs of a small run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers

from examples.arithmetic.teach import make_tokenizer
from grpo_core.config.algorithm import AlgorithmConfig
from grpo_core.config.base import Section
from grpo_core.config.files import dump_config, parse_config
from grpo_core.config.rollout import RolloutConfig
from grpo_core.config.training import TrainConfig
from grpo_core.planning.plan import make_plan, plan_inputs

ROLLOUTS = 2
BASE: dict[str, Any] = {
    "num_generations": 4,
    "max_completion_length": 12,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    "weight_decay": 0.01,
    "adam_epsilon": 1e-5,  # with 1e-8, rounding errors become full steps where a gradient is near 0
    "max_grad_norm": 1e9,  # a clipped gradient would hide an error of scale
    "vllm_importance_sampling_correction": False,
}
CORRECTED = {"vllm_importance_sampling_correction": True, "vllm_importance_sampling_clip_max": 1.3}
SEVERAL = {"steps_per_generation": 4, "num_iterations": 2}  # four updates a rollout
BY_DESIGN = {
    "top entropy, 2 micro-steps": "the quantile is over the generation batch, TRL's over each micro-step",
    "entropy bonus, 2 micro-steps": "the mean is over the generation batch's tokens, TRL's over each micro-step's",
}
CASES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo": {"loss_type": "grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "vespo": {"loss_type": "vespo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-3, **SEVERAL},
    "num_iterations 2": {"num_iterations": 2},
    "4 updates a rollout": SEVERAL,
    "grpo, 4 updates": {"loss_type": "grpo", "epsilon_high": 0.28, "delta": 1.5, **SEVERAL},
    "bnpo, 4 updates": {"loss_type": "bnpo", **SEVERAL},
    "cispo, 4 updates": {"loss_type": "cispo", "epsilon_high": 1.1, **SEVERAL},
    "sapo, 4 updates": {"loss_type": "sapo", **SEVERAL},
    "luspo, 4 updates": {"loss_type": "luspo", "importance_sampling_level": "sequence", **SEVERAL},
    "vespo, 4 updates": {"loss_type": "vespo", **SEVERAL},
    "updates across rollouts": {"steps_per_generation": 4, "gradient_accumulation_steps": 3},
    "no accumulation": {"gradient_accumulation_steps": 1},
    "kl": {"beta": 0.1},
    "kl, 4 updates": {"beta": 0.1, **SEVERAL},
    "kl without its correction": {"beta": 0.1, "use_bias_correction_kl": False, **SEVERAL},
    "kl, sequence ratios": {"beta": 0.1, "loss_type": "grpo", "importance_sampling_level": "sequence", **SEVERAL},
    "truncated masked": {"mask_truncated_completions": True},
    "truncated masked, grpo": {"mask_truncated_completions": True, "loss_type": "grpo", **SEVERAL},
    "temperature 0.7": {"temperature": 0.7, **SEVERAL},
    "scale_rewards none": {"scale_rewards": "none"},
    "scale_rewards batch": {"scale_rewards": "batch"},
    "gdpo": {"multi_objective_aggregation": "normalize_then_sum"},
    "half silent": {"silent": True},
    "half silent, 4 updates": {"silent": True, **SEVERAL},
    "half silent, bnpo": {"silent": True, "loss_type": "bnpo"},
    "half silent, kl": {"silent": True, "beta": 0.1},
    "clipped gradient": {"max_grad_norm": 0.01},
    "off-policy mask": {"off_policy_mask_threshold": 0.005, **SEVERAL},
    "correction": CORRECTED,
    "correction, 4 updates": {**CORRECTED, "silent": True, **SEVERAL},
    "correction, kl": {**CORRECTED, "beta": 0.1, **SEVERAL},
    "correction, vespo": {**CORRECTED, "loss_type": "vespo", "vllm_importance_sampling_mode": "token_mask", **SEVERAL},
    "correction, clamped sequences": {**CORRECTED, "vllm_importance_sampling_mode": "sequence_truncate"},
    "correction, clamped tokens": {**CORRECTED, "vllm_importance_sampling_mode": "token_truncate", **SEVERAL},
    "correction, off-policy mask": {**CORRECTED, "off_policy_mask_threshold": 0.005, **SEVERAL},
    "top entropy": {"top_entropy_quantile": 0.5, "gradient_accumulation_steps": 1},
    "entropy bonus": {"entropy_coef": 0.1, "gradient_accumulation_steps": 1},
    "top entropy, 2 micro-steps": {"top_entropy_quantile": 0.5},
    "entropy bonus, 2 micro-steps": {"entropy_coef": 0.1},
}


def digits(completion_ids: Sequence[Sequence[int]], silent: Sequence[bool], **_: Any) -> list[float]:
    return [0.7 if quiet else sum(ids) % 7 / 3 for ids, quiet in zip(completion_ids, silent, strict=True)]


def brevity(completion_ids: Sequence[Sequence[int]], silent: Sequence[bool], **_: Any) -> list[float | None]:
    """Reward short completions; None for those to which it does not apply."""
    rows = zip(completion_ids, silent, strict=True)
    return [0.25 if quiet else None if ids[0] % 5 == 0 else 1 / len(ids) for ids, quiet in rows]


def write_model(folder: Path) -> None:
    """Write a random Qwen2 model and the quickstart's tokenizer, with one token per character."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    tokens: dict[str, Any] = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    config = transformers.Qwen2Config(
        **sizes, **tokens, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_run(folder: Path, keys: dict[str, Any], silent: bool) -> None:
    """Write a run directory as the plan stage leaves it, for one epoch, with prompts for which sharing pays and others
    for which it does not."""
    sections: dict[str, type[Section]] = {"rollout": RolloutConfig, "algorithm": AlgorithmConfig, "train": TrainConfig}
    values: dict[str, Any] = {
        name: {key: keys[key] for key in keys if key in section.model_fields} for name, section in sections.items()
    }
    values["rollout"]["engine"] = "transformers"
    rewards: list[dict[str, Any]] = [{"function": f"{__name__}:{each.__name__}"} for each in (digits, brevity)]
    rewards[1]["weight"] = 0.5
    data = {"train": "train.parquet", "eval": "eval.parquet"}
    model = {"name_or_path": str(folder / "model")}
    config = parse_config({"name": "parity", "model": model, "data": data, "rewards": rewards, **values})
    steps = keys.get("steps_per_generation", keys["gradient_accumulation_steps"])
    prompts = ROLLOUTS * steps * keys["per_device_train_batch_size"] // keys["num_generations"]
    texts = [(f"{7**n}+" * 20)[: 56 + 5 * n % 32] for n in range(prompts)]
    rows = [{"prompt": text, "silent": silent and n % 2 == 0} for n, text in enumerate(texts)]
    run = folder / "run"
    (run / "dataset").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), run / "dataset" / "train.parquet")
    (run / "config.toml").write_text(dump_config(config))
    (run / "plan.json").write_text(json.dumps({"plan": asdict(make_plan(plan_inputs(config, prompts)))}))
