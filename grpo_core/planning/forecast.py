"""Forecasts of a planned run: memory, time, and the share of groups with a signal, each with how it was made.

Forecasts are estimates; the plan is exact. Imports no torch.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_core.config.memory_bounds import MAX_ROWS, chunk_tokens
from grpo_core.config.run import RunConfig
from grpo_core.planning.plan import Plan

GIB = 2**30
FLOAT, HALF = 4, 2  # bytes
# Assumptions about a GPU without an earlier run: its dense bf16 FLOP/s as measured, by a part of its name, and the
# fraction of them that published single-GPU RL training reaches.
MEASURED_FLOPS = {"H200": 790e12}
ASSUMED_UTILISATION = 0.11
FLOPS_PER_PARAMETER = 8  # a token is sampled (2) and trained on, forward and backward (6)
FLOPS_RECOMPUTED = 2  # gradient_checkpointing repeats the forward pass
NVIDIA_SMI_SECONDS = 10
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class ForecastError(ValueError):
    """A quantity that cannot be forecast; the message says why."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder of the Llama family: grouped-query attention, gated MLP. Sizes in elements."""

    layers: int
    hidden: int
    attention: int  # query heads · head size
    key_value: int  # key-value heads · head size
    intermediate: int
    vocabulary: int
    parameters: int


@dataclass(frozen=True)
class Throughput:
    """Pace of earlier runs: tokens (prompts and completions) per second and process, mean length of a completion."""

    tokens_per_second: float
    completion_tokens: float
    how: str


@dataclass(frozen=True)
class PromptLengths:
    """Tokens per prompt; `how`: the source of these numbers."""

    mean: float
    longest: int
    how: str


def find_gpu() -> str:
    """Name of this machine's first GPU, such as "NVIDIA H200"; "" without a GPU."""
    if not shutil.which("nvidia-smi"):
        return ""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # a driver without a GPU
        return ""
    return names.partition("\n")[0].strip()


def name_hardware(gpu: str) -> str:
    """The hardware for which a pace of training is known: the GPU's name, or "CPU with 2 cores"."""
    return gpu or f"CPU with {os.cpu_count()} cores"


def load_shape(name_or_path: str, revision: str | None = None) -> ModelShape:
    """Read config.json of a model folder or of the local Hugging Face cache. Raises ForecastError without one."""
    path = _config_file(name_or_path, revision)
    try:
        return model_shape(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError) as error:
        raise ForecastError(
            f"{path}: {'' if isinstance(error, ForecastError) else 'not a model config: '}{error}"
        ) from None


def load_positions(name_or_path: str, revision: str | None = None) -> int | None:
    """Number of positions of a model, by its config.json; None if that does not say, or is not on this machine."""
    try:
        values = json.loads(_config_file(name_or_path, revision).read_text())
        positions = values.get("text_config", values).get("max_position_embeddings")
    except (ValueError, AttributeError):
        return None
    return positions if isinstance(positions, int) else None


def _config_file(name_or_path: str, revision: str | None) -> Path:
    path = Path(name_or_path) / "config.json"
    if path.is_file():
        return path
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name_or_path, "config.json", revision=revision)
    except ValueError:  # a path, not a hub name
        cached = None
    if not isinstance(cached, str):
        raise ForecastError(
            f"model {name_or_path!r}: no such folder with a config.json, and none in the Hugging Face cache"
        )
    return Path(cached)


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Sizes of a model from its config.json. Raises ForecastError for families whose parameters are not known here."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ForecastError(f"model_type {family!r}: memory is forecast for {', '.join(FAMILIES)} only")
    h, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    size = config.get("head_dim") or h // heads
    q, kv = heads * size, (config.get("num_key_value_heads") or heads) * size
    intermediate, vocabulary = config["intermediate_size"], config["vocab_size"]
    biased = family == "qwen2" or config.get("attention_bias", False)
    attention = 2 * h * q + 2 * h * kv + (q + 2 * kv) * biased + h * (biased and family != "qwen2")
    attention += 2 * size * (family == "qwen3")  # norms of queries and keys
    mlp = 3 * h * intermediate + (2 * intermediate + h) * config.get("mlp_bias", False)
    embeddings = vocabulary * h * (1 if config.get("tie_word_embeddings", False) else 2)
    parameters = layers * (attention + mlp + 2 * h) + h + embeddings
    return ModelShape(layers, h, q, kv, intermediate, vocabulary, parameters)


def adapter_parameters(shape: ModelShape, config: RunConfig) -> int:
    """Parameters of the LoRA adapter: r·(in + out) for each adapted linear layer."""
    h, q, kv, i = shape.hidden, shape.attention, shape.key_value, shape.intermediate
    sizes = {"q_proj": h + q, "k_proj": h + kv, "v_proj": h + kv, "o_proj": q + h}
    sizes |= {"gate_proj": h + i, "up_proj": h + i, "down_proj": i + h}
    adapted = config.model.lora_target_modules or list(sizes)
    return shape.layers * config.model.lora_r * sum(sizes.get(name, 0) for name in adapted)


def forecast(
    config: RunConfig,
    plan: Plan,
    lengths: PromptLengths,
    known: Throughput | None,
    pass_rates: Sequence[float],
    gpu: str,
) -> dict[str, dict[str, Any]]:
    """Time, useful groups and, on a GPU, memory: each with `how` it was made, or with the `error` that prevented it.
    `gpu`: name of the GPU to train on; "" for a CPU."""
    found: dict[str, dict[str, Any]] = {}
    shape = None
    try:
        shape = load_shape(config.model.name_or_path, config.model.revision)
        if gpu:
            found["memory"] = peak_memory(config, plan, shape, lengths, gpu)
    except ForecastError as error:
        if gpu:
            found["memory"] = {"error": str(error)}
    try:
        found["time"] = wall_time(config, plan, lengths, known, shape.parameters if shape else None, gpu)
    except ForecastError as error:
        found["time"] = {"error": str(error)}
    if pass_rates:
        found["useful_groups"] = useful_groups(pass_rates, plan.num_generations)
    return found


def peak_memory(config: RunConfig, plan: Plan, shape: ModelShape, lengths: PromptLengths, gpu: str) -> dict[str, Any]:
    """Peak memory per GPU in bytes, by its parts, for completions of full length.

    Sampling and training take turns, so only the larger of their own parts counts; vLLM keeps its weights and cache.
    Memory of separate vLLM servers is not included.
    """
    weights, prompt, engine = shape.parameters, lengths.longest, config.rollout.engine_on(has_gpu=True)
    trained, frozen = (adapter_parameters(shape, config), weights) if config.model.use_peft else (weights, 0)
    half = config.train.mixed_precision == "bf16"
    width = HALF if half else FLOAT
    rows, completion = plan.per_device_train_batch_size, config.rollout.max_completion_length
    tokens = rows * (prompt + completion)
    per_process = -(-plan.generation_batch_size // plan.num_processes)
    in_flight = {"vllm": per_process, "vllm-server": 0}.get(engine, min(per_process, MAX_ROWS))
    cache = in_flight * (prompt + completion) * 2 * shape.layers * shape.key_value * width
    # Bytes per token that a layer keeps for the backward pass: norms and residuals in float32, the rest as computed.
    per_layer = FLOAT * 6 * shape.hidden + width * (5 * shape.attention + 4 * shape.intermediate)
    # Recomputing holds one layer's activations and about as much of their gradients.
    kept_layers = 2 if config.train.gradient_checkpointing else shape.layers
    checkpoints = FLOAT * shape.layers * shape.hidden if config.train.gradient_checkpointing else 0
    parts = {
        "weights": FLOAT * (frozen + trained) if not half else FLOAT * trained,  # frozen masters are the CPU's
        "gradients": FLOAT * trained,
        "optimizer": 2 * FLOAT * trained,
        "reference": width * weights * (config.algorithm.beta > 0 and not config.model.use_peft),
        "bf16_copy": HALF * (frozen + trained) * half,
        "activations": tokens * (kept_layers * per_layer + checkpoints),
        # Of a chunk, and their gradient.
        "logits": 2 * width * min(rows * completion, chunk_tokens("cuda", shape.vocabulary)) * shape.vocabulary,
        "kv_cache": cache,
        # For a server, the weights that are sent to it: a copy that stays as it is while the policy moves.
        "engine_weights": {"vllm": HALF * weights, "vllm-server": width * weights}.get(engine, 0),
    }
    training = parts["activations"] + parts["logits"]
    held = sum(parts.values()) - training - cache
    total = held + (training + cache if engine == "vllm" else max(training, cache))
    return {
        "peak_memory_gib": total / GIB,
        "parts_gib": {name: size / GIB for name, size in parts.items()},
        "parameters": weights,
        "how": (
            f"estimate for one {gpu}, from the model's config: {rows} completions per micro-step, "
            f"prompts of {prompt} tokens ({lengths.how}), "
            f"completions of {completion}; "
            + (f"{in_flight} completions sampled together by {engine}" if in_flight else "sampled by servers elsewhere")
        ),
    }


def wall_time(
    config: RunConfig,
    plan: Plan,
    lengths: PromptLengths,
    known: Throughput | None,
    parameters: int | None,
    gpu: str,
) -> dict[str, Any]:
    """Hours of the whole training, and GPU hours on a GPU, at the pace of earlier runs or one assumed for `gpu`.

    Raises ForecastError if there are no earlier runs and no pace can be assumed.
    """
    max_completion_length = config.rollout.max_completion_length
    if known:
        length, pace, how = min(known.completion_tokens, max_completion_length), known.tokens_per_second, known.how
    else:
        peak = _measured_flops(gpu)
        if parameters is None:
            raise ForecastError("neither an earlier run nor the model's size is known")
        flops = parameters * (FLOPS_PER_PARAMETER + FLOPS_RECOMPUTED * config.train.gradient_checkpointing)
        length, pace = max_completion_length, peak * ASSUMED_UTILISATION / flops
        how = (
            f"no earlier run is known; assumed: {ASSUMED_UTILISATION:.0%} of the {peak / 1e12:.0f} TFLOP/s of one "
            f"{gpu} per process, completions of full length ({max_completion_length} tokens)"
        )
    hours = plan.completions * (lengths.mean + length) / (pace * plan.num_processes) / 3600
    found = {"wall_time_hours": hours, "how": f"{how}; prompts of {lengths.mean:.0f} tokens ({lengths.how})"}
    return found | ({"gpu_hours": hours * plan.num_processes} if gpu else {})


def _measured_flops(gpu: str) -> float:
    for name, flops in MEASURED_FLOPS.items():
        if name in gpu.upper():
            return flops
    raise ForecastError(
        f"no earlier run of this model on this hardware ({name_hardware(gpu)}) is known, and a pace is assumed only "
        f"for {', '.join(MEASURED_FLOPS)}"
    )


def useful_groups(pass_rates: Sequence[float], num_generations: int) -> dict[str, Any]:
    """Expected share of groups with a signal: 1 − E[p^G + (1−p)^G], for rewards of 0 or 1 and pass rates p."""
    if not all(0 <= p <= 1 for p in pass_rates):
        return {"error": f"a pass rate lies between 0 and 1; given is {max(pass_rates, key=lambda p: abs(p - 0.5)):g}"}
    g = num_generations
    silent = sum(p**g + (1 - p) ** g for p in pass_rates) / len(pass_rates)
    how = f"1 − E[p^G + (1−p)^G], G = {g}, over {len(pass_rates)} known pass rates p"
    return {"share": 1 - silent, "silent_share": silent, "how": how}


def forecast_rows(forecasts: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """The forecasts in words: quantity, value, how it was made."""
    for name, found in forecasts.items():
        title = {"memory": "peak memory per GPU", "time": "wall time", "useful_groups": "groups with a signal"}[name]
        if "error" in found:
            yield title, "unknown until a first run" if name == "time" else "unknown", found["error"]
        elif name == "memory":
            yield title, _size(found["peak_memory_gib"]), found["how"]
            yield from ((f"  {part}", _size(size), "") for part, size in found["parts_gib"].items() if size)
        elif name == "time":
            yield title, _duration(found["wall_time_hours"]), found["how"]
            if "gpu_hours" in found:
                yield "GPU hours", f"{found['gpu_hours']:.2f}", ""
        else:
            yield title, f"{found['share']:.1%}", found["how"]


def _size(gib: float) -> str:
    return f"{gib:.1f} GiB" if gib >= 1 else f"{1024 * gib:.1f} MiB"


def _duration(hours: float) -> str:
    return f"{hours:.1f} h" if hours >= 1 else f"{60 * hours:.1f} min" if hours >= 1 / 60 else f"{3600 * hours:.1f} s"
