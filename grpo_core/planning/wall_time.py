"""Wall time of a run's probe, warm start and training: the updates, and what comes on top of them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_core.config.run import RunConfig
from grpo_core.config.teacher import source_teachers
from grpo_core.planning.hardware import Gpu
from grpo_core.planning.memory import MOMENTS
from grpo_core.planning.pace import NOT_VALIDATED, EnvironmentPace, Pace, Throughput, ValidatedCosts
from grpo_core.planning.plan import Plan
from grpo_core.planning.shapes import ForecastError, ModelShape, PromptLengths, adapter_parameters

# A GPU that is neither here nor known from earlier runs is assumed to reach ASSUMED_UTILISATION of its dense bf16
# FLOP/s: of an H200 as measured, of an H100 (SXM) by its data sheet.
PEAK_FLOPS = {"H200": 790e12, "H100": 989e12}
ASSUMED_UTILISATION = 0.11
UTILISATION_SOURCE = "published for RL training on one H100 by prime-rl, Qwen3-0.6B"
FLOPS_TRAINED = 6  # per parameter and token, forward and backward
FLOPS_SAMPLED = 2
FLOPS_REPEATED = 2  # gradient_checkpointing repeats the forward pass; lora_dropout computes one without dropout
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
) -> dict[str, Any]:
    """Hours of the probe and the warm start, if there are any, and the whole training, of each part, and GPU hours on a
    GPU: at the pace of earlier runs, at the one measured, or without either at one assumed for `gpu`.

    `silent_share`: of the groups, replaced in dynamic sampling; None if not known. `warm`: None if there is no warm
    start, or its demonstrations' sizes are not known. Raises ForecastError if no pace is known or can be assumed.
    """
    if isinstance(source, Throughput):
        length = min(source.completion_tokens, config.rollout.max_completion_length)
        pace = source.tokens_per_second * plan.num_processes
        parts, said = _probed_as_earlier(config, plan, lengths.mean, length, source)
        parts |= {
            "updates": plan.completions * (lengths.mean + length) / pace,
            "start, evaluations, checkpoints": source.other_seconds,
        }
        how = "; ".join([source.how, *said])
    elif isinstance(source, Pace):
        rounds, said = _rounds(config, plan, silent_share)
        talk = _conversation(config, lengths, source, costs.environment)
        taught = teacher_passes(config, plan, lengths, source.completion_tokens, shape, teachers)
        parts = _measured(config, plan, source, shape, gpu, rounds, costs, talk, taught)
        how = "; ".join([source.how, *talk.said, *said, *_left_out(config, costs)])
    else:
        parts, how = _assumed(config, plan, lengths, shape, gpu, teachers)
    if config.teacher.url and not isinstance(source, Throughput):
        how += "; without the time in which the teacher's server answers, which is not known"
    if warm:
        parts[WARM_START], said = _warm_start(config, lengths, source, shape, gpu, warm)
        how += said
    elif config.warm_start.is_used:
        made = "sampled" if config.warm_start.from_probe else "validated"
        how += f"; without the warm start, known once its demonstrations are {made}"
    hours, warming = sum(parts.values()) / 3600, parts.get(WARM_START, 0.0) / 3600
    found = {
        "wall_time_hours": hours,
        "parts_hours": {name: seconds / 3600 for name, seconds in parts.items()},
        "how": f"{how}; prompts of {lengths.mean:.0f} tokens ({lengths.how})",
    }
    held = hours * plan.num_processes + (hours - warming) * config.rollout.server_gpus
    return found | ({"gpu_hours": held} if gpu else {})


def scorings(config: RunConfig, plan: Plan) -> int:
    """Forward passes over each completion before it is trained on: for the reference's log-probabilities, and for the
    policy's old ones or its entropies."""
    algorithm = config.algorithm
    return (algorithm.beta > 0) + (not plan.on_policy or algorithm.top_entropy_quantile < 1)


def teacher_passes(
    config: RunConfig,
    plan: Plan,
    lengths: PromptLengths,
    completion: float,
    shape: ModelShape | None,
    teachers: Mapping[str, ModelShape],
) -> float:
    """Forward passes of the policy that those of the teacher over a completion take as long as, by the tokens that it
    reads and the parameters that each passes: one, or for a divergence one in each update; 0 without a teacher. With
    teachers of sources, the mean over the prompts of an epoch."""
    if not shape or not (teachers or config.teacher.is_policy):
        return 0.0
    passes = config.train.num_iterations if config.teacher.diverges else 1
    longer = max(lengths.shown - lengths.longest, 0) / (lengths.mean + completion)
    active = sum(it.active for it in teachers.values()) or shape.active
    if names := source_teachers(config):
        read = [(it.prompts_per_epoch, names[it.name]) for it in plan.sources]
        active = sum(number * teachers[name].active for number, name in read if name) / plan.num_prompts
    return (1 + longer) * passes * active / shape.active


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
) -> tuple[float, str]:
    """Seconds of the warm start, whose passes take as long per token as the training's, and a note on it."""
    own, plan = warm.config, warm.plan
    if isinstance(source, Throughput):
        each = lengths.mean + source.completion_tokens
        updated, sampled = each / source.tokens_per_second, source.sample_seconds or 0.0
        is_known = 0 < sampled < updated
        seconds = plan.completions / plan.num_processes * warm.tokens / each * (updated - sampled * is_known)
        return seconds, f"; the warm start {'' if is_known else 'at most, as if it sampled too, and '}without its start"
    if isinstance(source, Pace):
        measured = config.train.per_device_train_batch_size * (lengths.mean + source.completion_tokens)
        longer = _Conversation(trained=plan.per_device_train_batch_size * warm.tokens / measured)
        return sum(_measured(own, plan, source, shape, gpu, 1.0, NOT_VALIDATED, longer, 0.0).values()), ""
    prompts = replace(lengths, mean=warm.tokens - own.rollout.max_completion_length)
    return _assumed(own, plan, prompts, shape, gpu, {})[0]["updates"], "; demonstrations of their mean length"


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


def _assumed(
    config: RunConfig,
    plan: Plan,
    lengths: PromptLengths,
    shape: ModelShape | None,
    gpu: Gpu | None,
    teachers: Mapping[str, ModelShape],
) -> tuple[dict[str, float], str]:
    if gpu is None:
        raise ForecastError("no earlier run of this model on this hardware is known, and nothing was measured")
    name, peak = next(((name, peak) for name, peak in PEAK_FLOPS.items() if name in gpu.name.upper()), ("", 0.0))
    if not name:
        raise ForecastError(
            f"no earlier run of this model on this hardware ({gpu.name}) is known, and a pace is assumed only for "
            f"{', '.join(PEAK_FLOPS)}"
        )
    if config.train.mixed_precision != "bf16":
        raise ForecastError("no earlier run is known, and a pace is assumed only with train.mixed_precision = 'bf16'")
    if shape is None:
        raise ForecastError("neither an earlier run nor the model's size is known")
    repeated = config.train.gradient_checkpointing + (config.model.lora_dropout > 0)
    sampled = FLOPS_SAMPLED * (config.rollout.engine != "recorded")
    flops = shape.active * (FLOPS_TRAINED + sampled + FLOPS_REPEATED * repeated)
    longest = config.rollout.max_completion_length
    flops += FLOPS_SAMPLED * shape.active * teacher_passes(config, plan, lengths, longest, shape, teachers)
    tokens, speed = plan.completions * (lengths.mean + longest) / plan.num_processes, peak * ASSUMED_UTILISATION
    parts = {}
    if own := _probed(config, plan):
        parts[PROBE] = own * (lengths.mean + longest) * shape.active * FLOPS_SAMPLED / speed
    return parts | {"updates": tokens * flops / speed}, (
        f"no earlier run is known; assumed, not measured: {ASSUMED_UTILISATION:.0%} ({UTILISATION_SOURCE}) of the "
        f"{peak / 1e12:.0f} TFLOP/s of one {gpu.name} per process, completions of full length ({longest} tokens), "
        f"without start, evaluations{', environments' if config.environment.is_used else ''} and checkpoints"
        + ("; communication may come on top" if plan.num_processes > 1 else "")
        + ("; without what a base of 4 bits takes" if config.model.load_in_4bit else "")
    )
