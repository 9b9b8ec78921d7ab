"""Check that a base can be trained, and that an adapter to continue with is the one that the configuration describes.
Imports no torch."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from grpo_core.config.inputs import ModelConfig, quantisation_problem
from grpo_core.errors import ConfigError, install
from grpo_core.planning.shapes import ForecastError, config_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # in configurations of mixtures of experts
MODALITIES = ("vision_config", "audio_config", "vq_config")  # in configurations of multimodal models
VLLM_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM can make room for
# Keys of peft's adapter_config.json whose values change nothing: they describe the file, say how the adapter was drawn
# or trained, follow from the base's layers, or go with another key. Which layers are adapted, its tensors say too.
# In a plain LoRA every other key, except those of DESCRIBED, is null, false or empty: a newer peft may add some.
HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision"),
    *("task_type", "runtime_config", "lora_dropout", "corda_config", "eva_config", "loftq_config", "lora_ga_config"),
    *("fan_in_fan_out", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
    *("target_modules", "target_parameters", "modules_to_save"),
    *("exclude_modules", "layers_to_transform", "layers_pattern"),
}
DRAWN = (True, False, "gaussian", "orthogonal", "eva", "mica")  # init_lora_weights that leave the base as it is
OWN_EXCLUSION = re.compile(r"\(\?!\(.*\)\(\\\.\|\$\)\)\.\*")  # of what is beside the text model
TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_(?:embedding_)?A(?:\.weight)?")
DESCRIBED = {"r": "lora_r", "lora_alpha": "lora_alpha", "use_rslora": "use_rslora"}


def check_adapter(model: ModelConfig) -> None:
    """Raises ConfigError unless `model.adapter`, if there is one, is a plain LoRA of the rank, scale and layers that
    the other keys give, and the base is a whole model that is not quantised, and can be held in 4 bits, if that is
    wanted. A base whose config.json is not on this machine passes."""
    _check_folder(model)
    try:
        values = {} if model.gguf_file else json.loads(config_file(model.name_or_path, model.revision).read_text())
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
    if other := [f"peft_type = {kind!r}"] if kind != "LORA" else [*_not_plain(saved)]:
        raise ConfigError(
            f"model.adapter = {model.adapter!r}: an adapter with {', '.join(other)}, and only plain LoRA can be "
            "continued; merge it into its base with peft, and name the result in model.name_or_path"
        )
    wanted = {key: saved.get(name, False) for name, key in DESCRIBED.items()}
    if not saved.get("target_parameters"):  # else all-linear found experts, which it names in its own way
        wanted["lora_target_modules"] = _adapted(saved, folder / WEIGHTS, values) or model.lora_target_modules
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


def base_notes(model: ModelConfig) -> list[str]:
    """A sentence about a base that takes more than text; none for others, and if its config.json is not here."""
    try:
        values = json.loads(config_file(model.name_or_path, model.revision).read_text())
        kind = values.get("model_type")
    except (ForecastError, ValueError, AttributeError):
        return []
    return [
        f"{model.name_or_path} is a multimodal model ({kind}): its language model is trained on text, "
        "and what else it holds is saved as it is"
    ] * any(values.get(part) for part in MODALITIES)


def _check_folder(model: ModelConfig) -> None:
    """Raises ConfigError for a path that holds an adapter alone, or weights as GGUF that are not named as such; and if
    those that are named are not there, or cannot be read here."""
    name, path = model.name_or_path, Path(model.name_or_path)
    there = sorted(file.name for file in path.glob("*.gguf"))
    if model.gguf_file is not None:
        if path.exists() and not (path / model.gguf_file).is_file():
            raise ConfigError(
                f"model.gguf_file = {model.gguf_file!r}: no such file in {name}"
                + (f", which has {', '.join(there)}" if there else "")
            )
        if importlib.util.find_spec("gguf") is None:
            raise ConfigError(f"model.gguf_file needs the package gguf, not installed here: {install('gguf')}")
        return
    if (path / CONFIG).is_file():
        raise ConfigError(
            f"model.name_or_path = {name!r} is the folder of an adapter ({CONFIG}): name the base that it is for, and "
            "the folder in model.adapter; or merge the two with peft, and name the result"
        )
    if path.suffix == ".gguf" or (there and not (path / "config.json").is_file()):
        raise ConfigError(
            f"model.name_or_path = {name!r} holds weights as GGUF: name its folder, and the file in model.gguf_file"
        )


def _not_plain(saved: Mapping[str, Any]) -> Iterator[str]:
    """Yield each key of an adapter's configuration by which it is another function than plain LoRA, with its value."""
    for key, value in sorted(saved.items()):
        if key == "init_lora_weights":
            plain = value in DRAWN
        else:
            plain = not value or (key, value) == ("bias", "none") or key in (*HARMLESS, *DESCRIBED)
        if not plain:
            yield f"{key} = {value!r}"


def _adapted(saved: Mapping[str, Any], weights: Path, base: Mapping[str, Any]) -> list[str]:
    """The layers that an adapter is on, by names as `lora_target_modules` takes them. `base`: config.json, or empty.

    Where the configuration gives them by a pattern, or leaves layers out, they follow from the adapter's tensors: by
    the last part of their names if each of the base's layers has one, else by the whole names. Empty if that depends
    on a base that is not known."""
    names, excluded = saved.get("target_modules"), saved.get("exclude_modules")
    own = isinstance(excluded, str) and OWN_EXCLUSION.fullmatch(excluded)
    if isinstance(names, list) and saved.get("layers_to_transform") is None and (own or not excluded):
        return sorted(names)
    if not base:
        return []
    try:
        with safe_open(weights, "numpy") as file:
            adapted = [name[1] for name in map(TENSOR.fullmatch, file.keys()) if name]
    except SafetensorError as error:
        raise ConfigError(f"{weights} cannot be read: {error}") from error
    layers: dict[str, list[str]] = {}
    for name in adapted:
        layers.setdefault(name.rpartition(".")[2], []).append(name)
    count = base.get("text_config", base).get("num_hidden_layers")
    return sorted(name for last, whole in layers.items() for name in ([last] if len(whole) == count else whole))


def _check_4bit(name: str, values: Mapping[str, Any]) -> None:
    """Raises ConfigError if bitsandbytes is not installed, or would leave most of the base as it is."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(f"model.load_in_4bit = true needs bitsandbytes, not installed here: {install('qlora')}")
    if any(values.get("text_config", values).get(key) for key in EXPERTS):
        raise ConfigError(
            f"model.load_in_4bit = true: {name} is a mixture of experts, which are single tensors in "
            "transformers 5, and bitsandbytes quantises linear layers only; set it to false, or take a dense model"
        )
