"""Check that a base can be trained, and that an adapter to continue with is the one that the configuration describes.
Imports no torch."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_core.config.base_model import quantisation_problem
from grpo_core.config.inputs import ModelConfig
from grpo_core.errors import ConfigError, install
from grpo_core.planning.shapes import ForecastError, config_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # in configurations of mixtures of experts
VLLM_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM can make room for
# Features of peft's adapters that are not supported here, with the value that turns each off.
OTHERS: dict[str, Any] = {"bias": "none", "use_dora": False, "lora_bias": False}
OTHERS |= {"layers_to_transform": None, "layer_replication": None, "trainable_token_indices": None}
DESCRIBED = {"r": "lora_r", "lora_alpha": "lora_alpha", "use_rslora": "use_rslora"}


def check_adapter(model: ModelConfig) -> None:
    """Raises ConfigError unless `model.adapter`, if there is one, is a LoRA of the rank, scale and layers that the
    other keys give, and the base is not quantised, and can be held in 4 bits, if that is wanted. A base whose
    config.json is not on this machine passes."""
    try:
        values = json.loads(config_file(model.name_or_path, model.revision).read_text())
    except (ForecastError, ValueError):
        values = {}
    if problem := quantisation_problem(values):
        raise ConfigError(f"model.name_or_path = {model.name_or_path!r}: {problem}")
    if model.load_in_4bit:
        _check_4bit(model.name_or_path, values)
    if model.adapter is None:
        return
    folder = Path(model.adapter)
    if missing := [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]:
        raise ConfigError(
            f"model.adapter = {model.adapter!r}: no {' and no '.join(missing)} there; name the folder of an adapter as "
            "peft saves it, such as training/adapter of an earlier run"
        )
    try:
        saved = json.loads((folder / CONFIG).read_text())
        kind = saved["peft_type"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"model.adapter = {model.adapter!r}: its {CONFIG} is not an adapter's configuration"
        ) from None
    other = [
        f"{key} = {saved[key]!r}" for key, without in OTHERS.items() if saved.get(key, without) not in (without, {}, [])
    ]
    if kind != "LORA" or other:
        found = ", ".join(other) or f"peft_type = {kind!r}"
        raise ConfigError(
            f"model.adapter = {model.adapter!r}: an adapter with {found}, and only plain LoRA can be continued; "
            "merge it into its base, and name the result in model.name_or_path"
        )
    wanted = {key: saved.get(name, False) for name, key in DESCRIBED.items()}
    if not saved.get("target_parameters"):  # else all-linear found experts, which it names in its own way
        wanted["lora_target_modules"] = sorted(saved["target_modules"])
    if saved.get("modules_to_save") or model.lora_modules_to_save:
        wanted["lora_modules_to_save"] = sorted(saved.get("modules_to_save") or [])
    given = {key: getattr(model, key) for key in wanted}
    for key in ("lora_target_modules", "lora_modules_to_save"):
        if isinstance(given.get(key), list):
            given[key] = sorted(given[key])
    if differ := [key for key in wanted if wanted[key] != given[key]]:
        raise ConfigError(
            f"model.adapter = {model.adapter!r} is another adapter than the keys of [model] describe; write "
            + ", ".join(f"{key} = {json.dumps(wanted[key])}" for key in differ)
        )


def _check_4bit(name: str, values: Mapping[str, Any]) -> None:
    """Raises ConfigError if bitsandbytes is not installed, or would leave most of the base as it is."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(f"model.load_in_4bit = true needs bitsandbytes, not installed here: {install('qlora')}")
    if any(values.get("text_config", values).get(key) for key in EXPERTS):
        raise ConfigError(
            f"model.load_in_4bit = true: {name} is a mixture of experts, which are single tensors in "
            "transformers 5, and bitsandbytes quantises linear layers only; set it to false, or take a dense model"
        )
