"""Memory of one GPU at its worst moment, by its parts, and what vLLM's share of it must hold. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_core.config.memory_bounds import (
    DIVERGENCE_BYTES_PER_LOGIT,
    HEAD_BYTES_PER_LOGIT,
    MAX_ROWS,
    PACKED_BYTES,
    chunk_tokens,
)
from grpo_core.config.run import RunConfig
from grpo_core.config.teacher import loaded_teachers
from grpo_core.errors import ConfigError
from grpo_core.planning.adapter import VLLM_LORA_RANKS
from grpo_core.planning.hardware import Gpu
from grpo_core.planning.passes import (
    FLOAT,
    HALF,
    Pass,
    activations,
    describe_sharing,
    longest_sequence,
    per_machine,
    planned_pass,
    sharing_processes,
    width,
    working_set,
)
from grpo_core.planning.plan import Plan
from grpo_core.planning.shapes import ModelShape, PromptLengths, adapter_parameters, trains_head
from grpo_core.system.memory import GIB, gib_text

KV_BLOCK = 16  # tokens per block of vLLM's KV cache, one of which it never gives to a sequence
# Bytes of AdamW's two moments per byte of a float32 weight. If they have 8 bits, 256 have a float32 scale; small
# parameters, whose moments stay float32, are not counted apart.
MOMENTS = {"adamw": 2.0, "adamw_8bit": 2 * (1 + FLOAT / 256) / FLOAT}
NF4 = 0.5 + 1 / 64 + FLOAT / (64 * 256)  # bytes per weight: its code, and per 64 a scale of 8 bits that 256 scale again
MAX_UTILISATION = 0.95  # beyond it, too little is left for CUDA itself
# What a forecast leaves free of a GPU: CUDA's context, what the driver keeps and cuBLAS's workspaces (1.4 GiB of an
# H200 in all, of which 0.2 are torch's own); and for each byte the allocator's gaps (at most 1.2 % there), the
# forecast's own error (less than 1 %), and more keys per token where completions are shorter than the forecast's.
CUDA_GIB, SPARE = 1.0, 0.04


@dataclass(frozen=True)
class PlannedRun:
    """A run on GPUs, as planned: what its memory and its communication follow from."""

    config: RunConfig
    plan: Plan
    shape: ModelShape
    lengths: PromptLengths
    gpu: Gpu
    teachers: Mapping[str, ModelShape] = field(default_factory=dict)  # with weights of their own, by name

    @property
    def teaching(self) -> list[ModelShape]:
        """The teachers, of which the policy may be one."""
        return [self.shape] if self.config.teacher.is_policy else [*self.teachers.values()]


def peak_memory(run: PlannedRun, size: Pass | None = None) -> dict[str, Any]:
    """Peak memory per GPU in bytes, by its parts, for the largest pass of the plan (`planned_pass`), or for one of this
    `size`.

    Sampling and training take turns, so only the larger counts: gradients and what a pass needs, or the KV cache. A
    sharded base that an adapter is merged into comes after both. vLLM in the training process takes its share of the
    GPU for weights, workspace and cache; it keeps the weights, which are also the ones that the training computes with
    (under an adapter, the base's), and lends the rest to the training. Memory of separate vLLM servers is not included,
    nor what CUDA itself takes, see `usable_gib`.
    `host_memory_gib`, if the optimizer is offloaded: memory of one machine that its moments take.
    """
    config, shape, lengths, gpu = run.config, run.shape, run.lengths, run.gpu
    size = size or planned_pass(config, run.plan, lengths, shape)
    held, others, sampled = beside_training(run)
    training = training_parts(run, size)
    total = sum(held.values()) + max(sum(training.values()), *others.values())
    found = {
        "peak_memory_gib": total / GIB,
        "parts_gib": {name: bytes_ / GIB for name, bytes_ in (held | training | others).items()},
        "parameters": shape.parameters,
        "tokens_per_pass": math.ceil(size.tokens),
        "how": (
            f"estimate for one {gpu.name}"
            + (f" (this machine has {gpu.among})" if gpu.among else "")
            + f", from the model's config: {size.tokens:,.0f} tokens in a pass, prompts of {lengths.longest} tokens "
            f"({lengths.how}), completions of {config.rollout.max_completion_length}; "
            f"{describe_sharing(config, gpu)}{sampled}; of gradients and what a pass needs together, KV cache"
            + " and the base that the adapter is merged into" * bool(others["merged_base"])
            + " and the buffers that weights go to servers from" * bool(others["sending_buffers"])
            + ", only the largest counts"
            + "; recurrences as transformers computes them in Python, of which kernels keep less" * shape.has_recurrence
        ),
    }
    if config.train.offload == "optimizer":
        found["host_memory_gib"] = per_machine(config, gpu) * moments(run) / GIB
    if gpu.memory_gib:
        found["gpu_memory_gib"] = gpu.memory_gib
        if total > gpu.memory_gib * GIB:
            alone = size.tokens <= longest_sequence(config, lengths)
            found["warning"] = f"more than the {gib_text(gpu.memory_gib)} of one {gpu.name}" + (
                f", with the keys and values of {sampled}"
                if others["kv_cache"] > sum(training.values())
                else ", with the longest sequence alone in a pass" * alone
            )
    return found


def beside_training(run: PlannedRun) -> tuple[dict[str, float], dict[str, float], str]:
    """Bytes that are always held, bytes of what takes turns with the training, each by their parts, and in words how
    completions are sampled."""
    config, plan, shape, gpu = run.config, run.plan, run.shape, run.gpu
    weights, engine = shape.parameters, config.rollout.engine_on(has_gpu=True)
    lora, sharded = config.model.use_peft, config.train.sharding != "none"
    half = config.train.mixed_precision == "bf16"
    base = frozen_bytes(config, shape) if lora else 0.0
    w, sharing = width(config), sharing_processes(config, gpu)
    per_process = -(-plan.generation_batch_size // plan.num_processes)
    in_flight = {"vllm": per_process, "transformers": min(per_process, MAX_ROWS)}.get(engine, 0)
    cache: float = in_flight * cache_bytes(config, shape, longest_sequence(config, run.lengths))
    sampled = f"{in_flight} completions sampled together by {engine}"
    # vllm-server: a copy of the weights that are sent to it, kept while the policy moves; with sharding, and for an
    # adapter sent alone, it is in the host's memory. A restarted server also gets the weights that a 4-bit base stands
    # for. transformers: samples with the trained weights or, with sharding, with a whole copy.
    alone = sends_adapter(config, shape)
    engine_weights = {
        "vllm": _vllm_weights(config, shape),
        "vllm-server": w * weights * (not sharded and (not alone or config.model.load_in_4bit)),
        "transformers": w * weights * sharded,
        "recorded": 0,
    }[engine]
    if engine == "vllm-server":
        sampled = "sampled by servers elsewhere"
    elif engine == "recorded":
        sampled = "nothing is sampled"
    elif engine == "vllm":
        share = config.rollout.memory_share
        sampled = f"vLLM takes rollout.gpu_memory_utilization = {share:g} of "
        if gpu.memory_gib:
            sampled += gib_text(gpu.memory_gib)
            cache = max(share * gpu.memory_gib * GIB - engine_weights, 0.0)
        else:
            sampled += f"a memory that is not known; counted is a cache for {in_flight} completions"
    (trained, each), averages = _trained(run), config.teacher.update_rate is not None
    shared = engine == "vllm" and not sharded and config.rollout.vllm_tensor_parallel_size == 1
    if lora:  # what is shared is the frozen base
        shared = shared and alone and not config.model.load_in_4bit
    held = {
        # With bf16, a LoRA base has no float32 weights on the GPU.
        "weights": each * (lora or half or not shared) + base / sharing * (not half and not shared),
        "optimizer": moments(run) * (config.train.offload == "none"),
        "reference": _reference(config, shape) / sharing,
        "teacher": w * sum(teacher.parameters for teacher in run.teachers.values()) / sharing + each * averages,
        # What is gathered layer by layer needs no copy.
        "bf16_copy": (base / sharing * (not shared) + HALF * trained * (lora or not (sharded or shared))) * half,
        "engine_weights": engine_weights,
    }
    # At the end a second copy of the adapter is merged into a float32 base that is shared as the one that it was
    # trained on; each weight is whole in turn.
    merged = FLOAT * (weights / sharing + shape.largest_parameter + trained)
    # NCCL packs weights into one buffer while it sends another. A sharded model's come from the host's memory.
    largest = max(shape.vocabulary * shape.hidden, *(it.inputs * it.outputs for it, _ in shape.linear))
    buffer = min(PACKED_BYTES + w * largest, w * weights)
    whole = sends_by_nccl(config) and (not alone or config.model.load_in_4bit)
    others = {
        "kv_cache": cache,
        "merged_base": merged * (lora and sharded),
        "sending_buffers": (2 + sharded) * buffer * whole,
    }
    return held, others, sampled


def sends_adapter(config: RunConfig, shape: ModelShape) -> bool:
    """True if vLLM gets an adapter beside its own base; of what is not text alone, that is not known here."""
    model = config.model
    alone = model.use_peft and not model.lora_modules_to_save and model.lora_r <= VLLM_LORA_RANKS[-1]
    return alone and not shape.has_experts


def sends_by_nccl(config: RunConfig) -> bool:
    """True if weights go to servers by NCCL, on GPUs."""
    return config.rollout.engine == "vllm-server" and config.rollout.vllm_weight_transfer in ("auto", "nccl")


def training_parts(run: PlannedRun, size: Pass) -> dict[str, float]:
    """Bytes of gradients and of what passes need, at the worst moment of an update, by their parts."""
    config, shape = run.config, run.shape
    w, lora, (_, gradients) = width(config), config.model.use_peft, _trained(run)
    head = shape.vocabulary * shape.hidden * trains_head(shape, config)
    found = activations(config, shape, size)
    # The logits of a chunk, overwritten by their gradient, the states' gradient, and the float32 sum of the weight's.
    logits = HEAD_BYTES_PER_LOGIT * min(size.completions, chunk_tokens("cuda", shape.vocabulary)) * shape.vocabulary
    if shape.own_logits:  # of all tokens, and in float32 those of completions, twice
        logits = (w * size.tokens + 2 * FLOAT * size.completions) * shape.vocabulary
    states, head_gradient, taught = w * shape.hidden * size.completions, FLOAT * head, 0.0
    heads = embedding = 0.0  # the teachers': copies, until the policy's pass ends; gathered in their own
    if config.teacher.diverges:  # its head comes after the policy's, with the results of that one there
        chunk = min(size.completions, chunk_tokens("cpu", shape.vocabulary)) * shape.vocabulary
        logits = max(logits, DIVERGENCE_BYTES_PER_LOGIT * chunk)
        taught = w * max(teacher.hidden for teacher in run.teaching) * size.completions
        states, head_gradient = 2 * states, head_gradient + w * head
        sizes, is_sharded = [it.vocabulary * it.hidden for it in run.teaching], config.train.sharding != "none"
        if is_sharded or (config.teacher.update_rate is not None and head):
            heads = w * sum(sizes)
        embedding = w * max(it.outside - n for it, n in zip(run.teaching, sizes, strict=True)) * is_sharded
    copies = {"teacher_head": heads} if heads else {}
    worst: list[dict[str, float]] = []
    if config.train.sharding != "none":
        besides = max(found.in_norm, found.in_layer - found.outside)
        passes = working_set(config, shape, found.kept + taught, besides, logits + states, head_gradient)
        worst.append({"gradients": gradients} | copies | passes)
    else:
        before = copies | ({} if size.alone else {"gradients": gradients})
        # In the end, the float32 sum becomes a gradient in the precision of the pass.
        in_head = head_gradient + states + max(logits, w * head * (w == HALF))
        in_layers = max(found.kept + found.in_norm, found.layers + found.in_layer)
        in_head = before | {"activations": found.kept + taught, "logits": in_head}
        worst += [in_head, before | {"activations": in_layers + taught}]
        # In the first layer, which comes last: all gradients are there except its own and the embedding's.
        missing = FLOAT * (shape.largest_layer + shape.vocabulary * shape.hidden) * (size.alone and not lora)
        in_layer = found.layers / shape.layers + found.in_layer + taught
        worst.append(copies | {"gradients": gradients - missing, "activations": in_layer})
        # In the embedding, to whose gradient a tied head's is added, out of place.
        worst.append(copies | {"gradients": gradients, "embedding_gradients": w * head * (3 if shape.is_tied else 1)})
    if config.train.offload == "optimizer":  # a step has those of one parameter; of an adapter, less than a layer's
        most = 1 / shape.layers if lora else shape.largest_parameter / shape.parameters
        worst.append({"gradients": gradients, "optimizer": most * moments(run)})
    if run.teaching:  # scores before there are gradients, except for a divergence
        there = {"gradients": gradients} if config.teacher.diverges and not size.alone else {}
        shown = run.lengths.shown and run.lengths.shown + config.rollout.max_completion_length
        least = Pass(max(size.tokens, shown), max(size.keys, shown), size.completions, longest=max(size.longest, shown))
        taught = max(scoring_pass(config, each, least) for each in run.teaching) + heads + embedding
        if config.teacher.update_rate is not None:  # the policy's own weights, while it has the average's
            taught += gradients * (w / FLOAT if config.train.sharding == "none" else 1)
        worst.append(there | {"teacher_pass": taught})
    return max(worst, key=lambda parts: sum(parts.values()))


def scoring_pass(config: RunConfig, shape: ModelShape, size: Pass) -> float:
    """Bytes at the worst moment of a pass without gradients: the states of its tokens, and what one layer makes of them
    (with sharding, its weights and the next one's), or the logits of a chunk."""
    w, tokens = width(config), size.tokens
    layers = [
        max(
            3 * w * tokens * part.widest,
            w * (tokens * part.half + size.keys * part.keys) + FLOAT * tokens * part.single,
        )
        + tokens * size.longest * part.score_bytes
        for part, _ in shape.parts
    ]
    sharded = config.train.sharding != "none"
    chunk = min(size.completions, chunk_tokens("cuda", shape.vocabulary))
    logits = HEAD_BYTES_PER_LOGIT * chunk * shape.vocabulary + w * shape.hidden * shape.vocabulary * sharded
    if shape.own_logits:
        logits = (w * tokens + 2 * FLOAT * size.completions) * shape.vocabulary
    norms = (w + 2 * FLOAT) * tokens * shape.hidden
    return w * tokens * shape.hidden + norms + max(*layers, logits) + 2 * w * shape.largest_layer * sharded


def usable_gib(gpu: Gpu) -> float | None:
    """GiB of a GPU's memory that a forecast may fill; None if the memory is not known."""
    return None if gpu.memory_gib is None else (1 - SPARE) * (gpu.memory_gib - CUDA_GIB)


def moments(run: PlannedRun) -> float:
    """Bytes of AdamW's moments in one process."""
    return _trained(run)[1] * MOMENTS[run.config.train.optim]


def frozen_bytes(config: RunConfig, shape: ModelShape) -> float:
    """Bytes of an adapter's base. With load_in_4bit, the layers have 4 bits; norms and biases in them count alike."""
    layers = NF4 if config.model.load_in_4bit else width(config)
    return width(config) * shape.outside + layers * (shape.parameters - shape.outside)


def check_engine_memory(run: PlannedRun) -> None:
    """Raises ConfigError if vLLM, in the training process or in a server that the run starts on this machine, cannot
    start with its share of the GPU: it must hold vLLM's weights, and the keys and values of one sequence of the run's
    longest length.

    Both are exact, so a refused share is certainly too small. vLLM's workspace comes on top, so a share that passes may
    still be too small. Passes if the GPU's memory is not known.
    """
    config, shape, gpu = run.config, run.shape, run.gpu
    servers = config.rollout.starts_servers and not config.servers_elsewhere
    if not (servers or config.rollout.engine_on(has_gpu=True) == "vllm") or gpu.memory_gib is None:
        return
    if servers and gpu.among:  # theirs may be larger ones
        return
    longest = longest_sequence(config, run.lengths)
    blocks = math.ceil(longest / KV_BLOCK) + 1
    weights = _vllm_weights(config, shape) / GIB
    cache = cache_bytes(config, shape, blocks * KV_BLOCK) / config.rollout.vllm_tensor_parallel_size / GIB
    share, needed = config.rollout.memory_share, weights + cache
    if share * gpu.memory_gib > needed:
        return
    # Rounded up to a hundredth; workspace and CUDA graphs have what is left of it.
    least = math.floor(100 * needed / gpu.memory_gib + 1) / 100
    way_out = (
        f"set it to at least {least:g} (more, if vLLM then says that its own workspace lacks room)"
        if least <= MAX_UTILISATION
        else "take a GPU with more memory, a smaller model"
        + (", train.mixed_precision = 'bf16'" if width(config) == FLOAT else "")
        + ", or rollout.vllm_tensor_parallel_size, for "
        + ("GPUs that share a server's weights" if servers else "training processes that sample together")
    )
    raise ConfigError(
        f"rollout.gpu_memory_utilization = {share:g}: vLLM's share of one {gpu.name} is {share * gpu.memory_gib:.1f} "
        f"of {gib_text(gpu.memory_gib)}, and must hold its weights ({gib_text(weights)}) and the KV cache of at least "
        f"one sequence of {longest} tokens ({gib_text(cache)}); {way_out}"
    )


def check_teacher_memory(run: PlannedRun) -> None:
    """Raises ConfigError if the GPU cannot hold the weights of the teachers, or the policy's average, beside what is
    always there. Both are exact; what passes need comes on top; or if the divergence from one cannot be computed in
    chunks. Passes without a teacher, and if the GPU's memory is not known."""
    if run.config.teacher.diverges:
        for name, shape in ((run.config.model.name_or_path, run.shape), *run.teachers.items()):
            if shape.own_logits:
                raise ConfigError(
                    f"teacher.divergence_beta={run.config.teacher.divergence_beta:g} with {name!r}: its logits are not "
                    "those of a linear layer alone; remove it"
                )
    rate = run.config.teacher.update_rate
    if not (run.teachers or rate) or run.gpu.memory_gib is None:
        return
    held, _, _ = beside_training(run)
    total = sum(held.values()) / GIB
    if total > run.gpu.memory_gib:
        named = [f"{key} = {it.name_or_path!r}" for key, it in loaded_teachers(run.config).items()]
        whose, way_out = ("their" if len(named) > 1 else "its"), "take a smaller teacher"
        halves = width(run.config) == FLOAT
        if rate:  # float32 in any precision
            named, whose, way_out, halves = [f"teacher.update_rate = {rate:g}"], "the average's", "remove it", False
        raise ConfigError(
            f"{', '.join(named)}: {whose} weights are "
            f"{gib_text(held['teacher'] / GIB)} per GPU, "
            f"{gib_text(total)} with what else is always held, and one {run.gpu.name} has "
            f"{gib_text(run.gpu.memory_gib)}; {way_out}, share the models among more processes "
            "(train.sharding = 'full')" + ", or set train.mixed_precision = 'bf16'" * halves
        )


def check_host_memory(run: PlannedRun) -> None:
    """Raises ConfigError if the machine's own memory cannot hold the moments that its processes offload. They are
    exact; what else the machine needs comes on top. Passes for a machine that is not this one."""
    config, gpu = run.config, run.gpu
    if config.train.offload == "none" or gpu.host_gib is None:
        return
    processes, each = per_machine(config, gpu), moments(run) / GIB
    if processes * each > gpu.host_gib:
        raise ConfigError(
            f"train.offload = 'optimizer': AdamW's moments are {gib_text(each)} per process, "
            f"{gib_text(processes * each)} for the {processes} of this machine, whose memory is "
            f"{gib_text(gpu.host_gib)}; set it to 'none', or "
            + ("train.optim to 'adamw_8bit', or " if config.train.optim == "adamw" else "")
            + "share the model among more machines (train.sharding = 'full')"
        )


def _reference(config: RunConfig, shape: ModelShape) -> int:
    """Bytes of the reference policy. A moving one is float32; in bf16, unless sharded, with a copy to compute with."""
    algorithm = config.algorithm
    if algorithm.beta == 0 or config.model.use_peft:
        return 0
    w = width(config)
    if not algorithm.sync_ref_model:
        return w * shape.parameters
    return (FLOAT + w * (w == HALF and config.train.sharding == "none")) * shape.parameters


def _trained(run: PlannedRun) -> tuple[int, float]:
    """Parameters that are trained, and bytes of a float32 number for each in one process; an adapter's are not
    shared."""
    if run.config.model.use_peft:
        return (adapter := adapter_parameters(run.shape, run.config)), FLOAT * adapter
    return run.shape.parameters, FLOAT * run.shape.parameters / sharing_processes(run.config, run.gpu)


def _vllm_weights(config: RunConfig, shape: ModelShape) -> float:
    """Bytes of the weights of vLLM in the training processes, per GPU."""
    return width(config) * shape.parameters / config.rollout.vllm_tensor_parallel_size


def cache_bytes(config: RunConfig, shape: ModelShape, tokens: int) -> float:
    """Bytes that sampling a sequence of that many tokens keeps: keys and values, of its window where a layer has one,
    and states."""
    return sum(
        number
        * (width(config) * (part.cached * min(tokens, part.window or tokens) + part.convolved) + FLOAT * part.state)
        for part, number in shape.parts
    )
