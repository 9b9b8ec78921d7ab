"""Wall time of a run's probe, warm start and training: the updates, and what comes on top of them. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_core.config.memory_bounds import MAX_ROWS
from grpo_core.config.run import RunConfig
from grpo_core.planning.architectures.parts import Part
from grpo_core.planning.hardware import SPEEDS, Gpu, by_name
from grpo_core.planning.memory import MOMENTS, cache_bytes
from grpo_core.planning.pace import NOT_VALIDATED, EnvironmentPace, Pace, Throughput, ValidatedCosts
from grpo_core.planning.passes import HALF, longest_sequence, teacher_passes
from grpo_core.planning.plan import Plan
from grpo_core.planning.shapes import ForecastError, ModelShape, PromptLengths, adapter_parameters

# A GPU that is neither here nor known from earlier runs is assumed to reach these shares of its data sheet, best and
# worst. tests/grpo_core/planning/test_published.py counts the published updates that lie between.
UTILISATION = (0.535, 0.215)  # of FLOP/s, in passes
NEW = {"B200": (0.2, 0.08)}  # the same of GPUs whose published updates had kernels made for earlier ones
BANDWIDTH_SHARE = (0.85, 0.35)  # of the memory's bytes per second, when sampling
TOKEN_STEP_SECONDS = (0.004, 0.01)  # of a token step that reads little: 0.5B took 3.6 to 9.5 ms on an H200 or H100
UPDATE_SECONDS = (0.06, 0.15)  # per update, beside passes and sampling: 0.09 to 0.12 s on an H200
VLLM_ROWS = 256  # sampled together by default; LARGE_ROWS on an H100 or newer
LARGE_ROWS, LARGE_BANDWIDTH = 1024, 3e12
ATTENTION_BACKWARD = 2.5  # forward passes that a backward pass of fused attention takes
FORWARD = 1 / 3  # of the time of a forward and backward pass
WEIGHT_BYTES = 4  # per parameter of a saved model, or trained one of a checkpoint; there AdamW's moments come on top
TURNS = 2  # of a conversation, assumed until a run tells: one that calls a tool, and one after its answer
PROBE, WARM_START = "probe", "warm-start"  # the parts that are not training
VLLM_START_SECONDS = 60.0  # assumed: nothing short of starting vLLM measures it


@dataclass(frozen=True)
class WarmStart:
    """A warm start's own configuration and plan, and the mean of the tokens of a demonstration with its prompt."""

    config: RunConfig
    plan: Plan
    tokens: float


def wall_time(
    config: RunConfig,
    plan: Plan,
    lengths: PromptLengths,
    source: Throughput | Pace | None,
    shape: ModelShape | None,
    gpu: Gpu | None,
    teachers: Mapping[str, ModelShape] = {},
    *,
    costs: ValidatedCosts = NOT_VALIDATED,
    silent_share: float | None = None,
    warm: WarmStart | None = None,
    communication: float = 0.0,
) -> dict[str, Any]:
    """Hours of the probe and the warm start, if there are any, and the whole training, of each part, and GPU hours on a
    GPU: at the pace of earlier runs, at the one measured, or without either at one assumed for `gpu`. What is assumed
    is an interval (`interval_hours`), and the other figures are its geometric middle.

    `silent_share`: of the groups, replaced in dynamic sampling; None if not known. `warm`: None if there is no warm
    start, or its demonstrations' sizes are not known. `communication`: seconds per update between GPUs, which a pace
    that is known or measured holds. Raises ForecastError if no pace is known or can be assumed.
    """
    if isinstance(source, Throughput):
        length = min(source.completion_tokens, config.rollout.max_completion_length)
        pace = source.tokens_per_second * plan.num_processes
        parts, said = _probed_as_earlier(config, plan, lengths.mean, length, source)
        parts |= {
            "updates": plan.completions * (lengths.mean + length) / pace,
            "start, evaluations, checkpoints": source.other_seconds,
        }
        each, said = _as_intervals(parts), [source.how, *said]
    elif isinstance(source, Pace):
        rounds, replaced = _rounds(config, plan, silent_share)
        talk = _conversation(config, lengths, source, costs.environment)
        taught = teacher_passes(config, plan, lengths, source.completion_tokens, shape, teachers)
        each = _as_intervals(_measured(config, plan, source, shape, gpu, rounds, costs, talk, taught))
        said = [source.how, *talk.said, *replaced, *_left_out(config, costs)]
    else:
        rounds, replaced = _rounds(config, plan, silent_share)
        each, how = _assumed(config, plan, lengths, shape, gpu, teachers, rounds, communication)
        said = [how, *replaced]
    if config.teacher.url and not isinstance(source, Throughput):
        said.append("without the time in which the teacher's server answers, which is not known")
    if config.teacher.template and not lengths.shown:
        said.append("without what teacher.template adds to prompts, known once the data are validated")
    if warm:
        each[WARM_START], note = _warm_start(config, lengths, source, shape, gpu, warm, communication)
        said += note
    elif config.warm_start.is_used:
        made = "sampled" if config.warm_start.from_probe else "validated"
        said.append(f"without the warm start, known once its demonstrations are {made}")
    parts = {name: math.sqrt(low * high) / 3600 for name, (low, high) in each.items()}
    hours = sum(parts.values())
    found: dict[str, Any] = {
        "wall_time_hours": hours,
        "parts_hours": parts,
        "how": "; ".join([*said, f"prompts of {lengths.mean:.0f} tokens ({lengths.how})"]),
    }
    if source is None or isinstance(source, str):
        found["interval_hours"] = [sum(ends) / 3600 for ends in zip(*each.values(), strict=True)]
    held = hours * plan.num_processes + (hours - parts.get(WARM_START, 0.0)) * config.rollout.server_gpus
    return found | ({"gpu_hours": held} if gpu else {})


def _as_intervals(parts: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    return {name: (seconds, seconds) for name, seconds in parts.items()}


def scorings(config: RunConfig, plan: Plan) -> int:
    """Forward passes over each completion before it is trained on: for the reference's log-probabilities, and for the
    policy's old ones or its entropies."""
    algorithm = config.algorithm
    return (algorithm.beta > 0) + (not plan.on_policy or algorithm.top_entropy_quantile < 1)


@dataclass(frozen=True)
class _Conversation:
    """A conversation compared with the completion that was measured: how many times as long it is sampled and trained
    on, and the seconds that it waits for its environment."""

    sampled: float = 1.0
    trained: float = 1.0
    waits: float = 0.0
    said: Sequence[str] = ()


def _conversation(
    config: RunConfig, lengths: PromptLengths, pace: Pace, environment: EnvironmentPace | None
) -> _Conversation:
    """Assume that each turn is as long as a completion measured, within max_completion_length."""
    if not config.environment.is_used:
        return _Conversation()
    turns, one = min(TURNS, config.environment.max_turns), pace.completion_tokens
    found = environment or EnvironmentPace(0.0, 0.0, 0.0, 0.0)
    told = found.frame_tokens + (turns - 1) * found.call_tokens
    policy = max(min(turns * one, config.rollout.max_completion_length - told), 1.0)
    return _Conversation(
        policy / one,
        (lengths.mean + policy + told) / (lengths.mean + one),
        found.frame_seconds + (turns - 1) * found.call_seconds,
        [
            f"conversations of {policy + told:.0f} tokens: {turns} turns are assumed (no earlier run says how many), "
            "each as long as a completion measured, whose prompt shows no tools, with a call of the slowest tool "
            "between; those of a batch wait for their environments at the same time"
        ],
    )


def _probed(config: RunConfig, plan: Plan) -> int:
    """Completions that each process samples in the probe."""
    return -(-plan.num_prompts // plan.num_processes) * config.data.curriculum.probe


def _probed_as_earlier(
    config: RunConfig, plan: Plan, prompt_tokens: float, length: float, source: Throughput
) -> tuple[dict[str, float], Sequence[str]]:
    """Seconds of the probe, if there is one, and notes on it. `length`: of a completion."""
    if not (own := _probed(config, plan)):
        return {}, []
    if source.sample_seconds is None:
        each, said = (prompt_tokens + length) / source.tokens_per_second, "the probe at most, as if it trained too, and"
    else:
        each, said = source.sample_seconds * length / source.completion_tokens, "the probe"
    return {PROBE: own * each}, [f"{said} without its start"]


def _measured(
    config: RunConfig,
    plan: Plan,
    pace: Pace,
    shape: ModelShape | None,
    gpu: Gpu | None,
    rounds: float,
    costs: ValidatedCosts,
    talk: _Conversation,
    taught: float,
) -> dict[str, float]:
    """Seconds of the probe, if there is one, and of each part of a training, at a measured pace."""
    samples = config.rollout.engine != "recorded"
    per_process = plan.generation_batch_size / plan.num_processes * samples
    completion_seconds = talk.sampled * pace.sample_seconds / pace.completions
    reward_seconds = costs.reward_seconds or 0.0
    scored = reward_seconds * rounds * per_process * plan.rollouts
    trainings = plan.num_iterations * (1 + FORWARD * (config.model.lora_dropout > 0))
    slices = plan.rollouts * plan.steps_per_generation * (trainings + FORWARD * (scorings(config, plan) + taught))
    uses_vllm = samples and config.rollout.engine_on(has_gpu=gpu is not None) != "transformers"
    start = pace.start_seconds + VLLM_START_SECONDS * uses_vllm
    parts = {}
    if own := _probed(config, plan):
        parts[PROBE] = start + own * (completion_seconds + reward_seconds) + talk.waits
    parts |= {
        "updates": plan.rollouts * rounds * per_process * completion_seconds
        + scored
        + slices * talk.trained * pace.train_seconds
        + plan.max_steps * pace.step_seconds,
        "start": start,
    }
    if talk.waits and samples:
        parts["waiting for environments"] = plan.rollouts * rounds * talk.waits
    if plan.evaluations and costs.held_out_prompts:
        longer = config.evaluation_length / config.rollout.max_completion_length
        own = -(-costs.held_out_prompts // plan.num_processes)
        each = own * (completion_seconds * longer + reward_seconds) + talk.waits
        parts["evaluations"] = plan.evaluations * each
    if shape:
        trained = adapter_parameters(shape, config) if config.model.use_peft else shape.parameters
        size = WEIGHT_BYTES * (1 + MOMENTS[config.train.optim]) * trained
        saved = (plan.max_steps - 1) // config.train.save_steps * size
        parts["checkpoints"] = (saved + WEIGHT_BYTES * shape.parameters) * pace.byte_seconds
    return parts


def _warm_start(
    config: RunConfig,
    lengths: PromptLengths,
    source: Throughput | Pace | None,
    shape: ModelShape | None,
    gpu: Gpu | None,
    warm: WarmStart,
    communication: float,
) -> tuple[tuple[float, float], list[str]]:
    """Ends of the seconds of the warm start, whose passes take as long per token as the training's, and notes on it."""
    own, plan = warm.config, warm.plan
    if isinstance(source, Throughput):
        each = lengths.mean + source.completion_tokens
        updated, sampled = each / source.tokens_per_second, source.sample_seconds or 0.0
        is_known = 0 < sampled < updated
        seconds = plan.completions / plan.num_processes * warm.tokens / each * (updated - sampled * is_known)
        note = f"the warm start {'' if is_known else 'at most, as if it sampled too, and '}without its start"
        return (seconds, seconds), [note]
    if isinstance(source, Pace):
        measured = config.train.per_device_train_batch_size * (lengths.mean + source.completion_tokens)
        longer = _Conversation(trained=plan.per_device_train_batch_size * warm.tokens / measured)
        seconds = sum(_measured(own, plan, source, shape, gpu, 1.0, NOT_VALIDATED, longer, 0.0).values())
        return (seconds, seconds), []
    learnt = min(own.rollout.max_completion_length, max(round(warm.tokens), 1))
    own = own.model_copy(update={"rollout": own.rollout.model_copy(update={"max_completion_length": learnt})})
    prompts = replace(lengths, mean=max(warm.tokens - learnt, 0.0))
    ends, _ = _assumed(own, plan, prompts, shape, gpu, {}, 1.0, communication)
    return ends["updates"], ["demonstrations of their mean length"]


def _rounds(config: RunConfig, plan: Plan, silent_share: float | None) -> tuple[float, Sequence[str]]:
    """Mean number of times that a generation batch is sampled, and notes on it."""
    if not config.rollout.dynamic_sample:
        return 1.0, []
    max_rounds = plan.max_completions / plan.completions
    if silent_share is None:
        return 1.0, [
            f"without groups that dynamic sampling replaces (sampling takes up to {max_rounds:g} times as long)"
        ]
    rounds = sum(silent_share**k for k in range(config.rollout.max_resample_times + 1))
    return rounds, [f"dynamic sampling draws {rounds:.2f} times as many completions at these pass rates"]


def _left_out(config: RunConfig, costs: ValidatedCosts) -> Sequence[str]:
    if config.rollout.engine == "recorded":
        return ["without sampling and scoring, which a recording has done"]
    missing = ["the environment"] if config.environment.is_used and costs.environment is None else []
    if costs.reward_seconds is None:
        missing.append("scoring")
    if config.train.eval_steps and not costs.held_out_prompts:
        missing.append("evaluations")
    return [f"without {' and '.join(missing)}, known once the data are validated"] if missing else []


def update_flops(
    config: RunConfig, plan: Plan, lengths: PromptLengths, shape: ModelShape, teachers: Mapping[str, ModelShape] = {}
) -> float:
    """FLOPs of one process in all passes of a training: products with the weights that a token passes, and attention
    by the keys that it sees. A packed prompt counts once per group; recurrences count by their weights alone."""
    prompt, longest, lora = lengths.mean, config.rollout.max_completion_length, config.model.use_peft
    rows = plan.completions / plan.num_processes
    groups = rows / (plan.num_generations if shape.packs(longest_sequence(config, lengths)) else 1)

    def keys(part: Part, tokens: float) -> float:
        """Pairs of a token and a key that it sees, in a sequence of so many tokens."""
        seen = min(part.window or tokens, tokens)
        return seen * tokens - seen**2 / 2

    prompts, completions = (
        sum(2 * number * part.scored * (keys(part, tokens) - keys(part, before)) for part, number in shape.parts)
        for tokens, before in ((prompt, 0.0), (prompt + longest, prompt))
    )
    layer = 2.0 * (shape.active - shape.outside)
    layers, attention = layer * (groups * prompt + rows * longest), groups * prompts + rows * completions
    head = 2.0 * shape.vocabulary * shape.hidden * rows * longest
    forward = layers + head + attention
    again, backward = config.train.gradient_checkpointing, 1 if lora else 2  # a frozen weight has no gradient
    trained = forward * (1 + (config.model.lora_dropout > 0)) + (again + backward) * layers + backward * head
    trained += (again + ATTENTION_BACKWARD) * attention
    scored = scorings(config, plan) + teacher_passes(config, plan, lengths, longest, shape, teachers)
    prefill = groups * (layer * prompt + prompts) * (config.rollout.engine != "recorded")
    return plan.num_iterations * trained + scored * forward + prefill


def sampling_seconds(
    config: RunConfig, lengths: PromptLengths, shape: ModelShape, rows: float, bandwidth: float
) -> tuple[float, float]:
    """Ends of the seconds in which one engine samples so many completions of full length: each token step reads the
    weights and every sequence's cache."""
    rollout, engine = config.rollout, config.rollout.engine_on(has_gpu=True)
    sharing = 1 if engine == "transformers" else rollout.vllm_tensor_parallel_size
    by_default = LARGE_ROWS if bandwidth > LARGE_BANDWIDTH else VLLM_ROWS
    together = MAX_ROWS if engine == "transformers" else rollout.vllm_args.get("max_num_seqs", by_default)
    steps = math.ceil(rows / together) * rollout.max_completion_length
    mean = round(lengths.mean + rollout.max_completion_length / 2)
    weights = HALF * (shape.parameters - shape.vocabulary * shape.hidden * (not shape.is_tied))
    cache = rows * rollout.max_completion_length * cache_bytes(config, shape, mean)
    read = (steps * weights + cache) / sharing / bandwidth
    low, high = (
        max(steps * least, read / share) for least, share in zip(TOKEN_STEP_SECONDS, BANDWIDTH_SHARE, strict=True)
    )
    return low, high


def _assumed(
    config: RunConfig,
    plan: Plan,
    lengths: PromptLengths,
    shape: ModelShape | None,
    gpu: Gpu | None,
    teachers: Mapping[str, ModelShape],
    rounds: float,
    communication: float,
) -> tuple[dict[str, tuple[float, float]], str]:
    """Ends of the seconds of the probe, if there is one, and of the updates, and how they were made."""
    if gpu is None:
        raise ForecastError("no earlier run of this model on this hardware is known, and nothing was measured")
    if (speed := by_name(SPEEDS, gpu.name)) is None:
        raise ForecastError(
            f"no earlier run of this model on this hardware ({gpu.name}) is known, and a pace is assumed only for "
            f"{', '.join(SPEEDS)}"
        )
    if config.train.mixed_precision != "bf16":
        raise ForecastError("no earlier run is known, and a pace is assumed only with train.mixed_precision = 'bf16'")
    if shape is None:
        raise ForecastError("neither an earlier run nor the model's size is known")
    new = by_name(NEW, gpu.name)
    if new and shape.has_experts:
        raise ForecastError(
            f"no earlier run is known, and no pace is assumed for a mixture of experts on one {gpu.name}: the "
            "utilisation of published ones differs by five times"
        )
    (flops, bandwidth), shares, rollout = speed, new or UTILISATION, config.rollout
    engine, longest = rollout.engine_on(has_gpu=True), rollout.max_completion_length
    sharing = 1 if engine == "transformers" else rollout.vllm_tensor_parallel_size
    servers = rollout.server_gpus // sharing or len(rollout.vllm_server_base_urls)
    engines = servers or max(plan.num_processes // sharing, 1)

    def sampled(completions: float) -> tuple[float, float]:
        return sampling_seconds(config, lengths, shape, completions / engines, bandwidth)

    parts = {PROBE: sampled(probed * plan.num_processes)} if (probed := _probed(config, plan)) else {}
    each = sampled(rounds * plan.generation_batch_size) if engine != "recorded" else (0.0, 0.0)
    passes, between = update_flops(config, plan, lengths, shape, teachers), plan.max_steps * communication
    low, high = (
        passes / (share * flops) + plan.rollouts * seconds + between + plan.max_steps * beside
        for share, seconds, beside in zip(shares, each, UPDATE_SECONDS, strict=True)
    )
    return parts | {"updates": (low, high)}, (
        f"no earlier run is known; assumed, not measured: passes at {shares[1]:.1%} to {shares[0]:.1%} of the "
        f"{flops / 1e12:.0f} TFLOP/s of one {gpu.name} per process, with attention"
        + (
            f", sampling at {BANDWIDTH_SHARE[1]:.0%} to {BANDWIDTH_SHARE[0]:.0%} of its {bandwidth / 1e12:.3g} TB/s"
            if engine != "recorded"
            else ""
        )
        + (", communication that nothing hides" if communication else "")
        + (", nothing sampled ahead" if rollout.max_staleness else "")
        + f", completions of full length ({longest} tokens), without start, evaluations"
        + f"{', environments' if config.environment.is_used else ''} and checkpoints"
        + ("; without what a base of 4 bits takes" if config.model.load_in_4bit else "")
    )
