"""Everything that a training uses from its first update to its last, loaded from a run directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import set_seed
from torch import Tensor

from grpo_core import run_files
from grpo_core.config.files import load_config
from grpo_core.config.inputs import ModelConfig
from grpo_core.config.run import RunConfig
from grpo_core.config.teacher import loaded_teachers
from grpo_core.config.warm_start import supervised
from grpo_core.data.curriculum import PassRates, no_rates, read_rates
from grpo_core.data.demonstrations import Demonstrations, demonstrations_file, read_demonstrations, starting_model
from grpo_core.data.prompts import Prompts, check_teacher_tokenizer
from grpo_core.data.recording import check_recording, check_tokens
from grpo_core.data.teacher import check_positions, check_teacher, check_top_k
from grpo_core.distributed import any_process, from_main
from grpo_core.environments.setting import Setting
from grpo_core.errors import ConfigError, TrainingError
from grpo_core.model.images import Images
from grpo_core.model.loading import copy_of_trainable_state, load_model, other_weights, with_adapter
from grpo_core.model.logprobs import FUSED
from grpo_core.model.policy import OWN_LOGITS, Policy
from grpo_core.model.pretrained import usable_positions
from grpo_core.model.routing import routers_of
from grpo_core.model.sharded import sharding
from grpo_core.planning.adapter import base_notes, check_adapter
from grpo_core.planning.plan import Plan, load_plan
from grpo_core.rewards.composition import check_curriculum, has_pass_rates
from grpo_core.rewards.contract import rewards_of
from grpo_core.rollout.collect import Scoring
from grpo_core.rollout.conversations import ConversationsAhead
from grpo_core.rollout.loading import check_lengths, fallbacks, make_engine, read_prompts, start_configured
from grpo_core.rollout.privileged import Privileged, load_privileged
from grpo_core.rollout.requests import training_sampling
from grpo_core.rollout.sampling import lowest_kept
from grpo_core.rollout.transformers_engine import TransformersEngine
from grpo_core.rollout.types import Engine, Lookahead
from grpo_core.training.interrupt import uninterrupted
from grpo_core.training.optimizer import learning_rate, make_optimizer
from grpo_core.training.out_of_memory import OutOfMemoryRetry, first_limit
from grpo_core.training.sync_probe import SHORTEST, Probe, probe_batch

DATA_PARALLEL = {DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}


@dataclass(frozen=True)
class Sampler:
    """What samples from the policy, and what checks that it has the policy's weights."""

    engine: Engine
    lookahead: Lookahead | None  # samples ahead of the training: the engine, or conversations with it
    probe: Probe


@dataclass(frozen=True)
class Session:
    """Configuration, data and the objects that hold weights; what changes from update to update is `TrainingState`."""

    config: RunConfig
    plan: Plan
    accelerator: Accelerator
    prompts: Prompts
    held_out: Prompts | None  # for evaluation in training
    scoring: Scoring  # without rewards and setting if the training is on a recording, which has their values
    model: Any  # the causal LM with the weights that are trained, under its adapter if there is one
    policy: Policy
    reference: Policy | None  # its own model; None without KL, and with an adapter, whose base is the reference
    optimizer: torch.optim.Optimizer
    learning_rate: Callable[[int], float]  # by the number of updates done
    sampler: Sampler | None  # None: the training is on a recording, or on demonstrations
    memory: OutOfMemoryRetry
    teachers: Mapping[str, Policy] = field(default_factory=dict)  # loaded, by name; none if policy or server teaches
    privileged: Privileged | None = None  # what a teacher is shown that the policy is not
    start: dict[str, Tensor] | None = None  # the adapter that the training started from, if the reference has it
    average: dict[str, Tensor] | None = None  # of the policy's trained weights, if that teaches; moves with each update
    rates: PassRates | None = None  # at the start of the training; None if no reward tells what passes
    demonstrations: Demonstrations | None = None  # of a warm start


def load_session(run: Path, warm_start: Path | None = None) -> Session:
    """Load and prepare everything that the run directory's configuration names: for its training, or for the warm start
    with the plan in this folder. Raises TrainingError if the device's memory does not hold it together with gradients
    and optimizer state."""
    config, demonstrations = load_config(run / run_files.CONFIG), None
    if warm_start is not None:
        demonstrations = read_demonstrations(demonstrations_file(config, run))
        config = supervised(config, demonstrations.longest_completion)
    plan = load_plan((warm_start or run) / run_files.PLAN)
    config, accelerator = start_configured(config, deterministic=config.train.deterministic)
    if accelerator.distributed_type not in DATA_PARALLEL:
        raise TrainingError(
            f"Accelerate is configured for {accelerator.distributed_type.value}, and this training divides model and "
            "batch by itself (train.sharding): start the processes with `torchrun`"
        )
    if accelerator.num_processes != plan.num_processes:
        raise TrainingError(
            f"the plan is for num_processes={plan.num_processes}, but {accelerator.num_processes} were started; "
            f"use `torchrun --nproc-per-node {plan.num_processes}`, or change train.num_processes "
            "and plan again"
        )
    if accelerator.device.type == "cuda" and accelerator.is_main_process:
        for note in config.gpu_notes:
            print(note, flush=True)
    try:
        return _load(run, config, plan, accelerator, demonstrations)
    except torch.OutOfMemoryError as error:
        unset = {
            "train.offload = 'optimizer'": config.train.offload == "none",
            "train.optim = 'adamw_8bit'": config.train.optim == "adamw",
            "model.use_peft": not config.model.use_peft,
            "model.load_in_4bit": config.model.use_peft and not config.model.load_in_4bit,
        }
        keys = " or ".join(key for key, applies in unset.items() if applies)
        raise TrainingError(
            "memory runs out before the first step: the device does not hold the weights, their gradients and AdamW's "
            f"state, beside the engine. {f'Set {keys}, take' if keys else 'Take'} a smaller model, lower "
            "rollout.gpu_memory_utilization, or sample on other GPUs (rollout.engine = 'vllm-server'); `grpo plan` "
            f"forecasts what is needed ({error})"
        ) from error


def _load(
    run: Path, config: RunConfig, plan: Plan, accelerator: Accelerator, demonstrations: Demonstrations | None
) -> Session:
    check_adapter(config.model)
    if config.teacher.url is not None:
        from grpo_core.rollout.served_teacher import wait_for_teacher  # imports httpx2

        wait_for_teacher(config)
    check_teacher(config)
    if not demonstrations:
        check_curriculum(config)
    without_engine = config.rollout.engine == "recorded"
    is_recorded = without_engine and not demonstrations
    if is_recorded:
        check_recording(config, plan, run)
    rewards = [] if without_engine else rewards_of(config)
    names = [] if demonstrations else ["train", "eval"] if config.train.eval_steps else ["train"]
    loaded = read_prompts(config, {name: run_files.prompts(run, name) for name in names})
    tokenizer, setting = loaded.tokenizer, loaded.setting
    check_teacher_tokenizer(config, tokenizer)
    held_out = loaded.sets.get("eval")
    if demonstrations:  # the longest prompt and the longest completion may be of different ones
        prompts = Prompts(demonstrations.rows, [], demonstrations.longest - demonstrations.longest_completion)
    else:
        prompts = loaded.sets["train"]
    if is_recorded:
        check_tokens(config, plan, tokenizer, prompts.rows)
        if setting:  # it was for the tokens of its prompts
            setting.environments.close()
            setting = None
    set_seed(config.seed)
    # vLLM cannot score a sequence of its greatest length: it needs room for one more token.
    longest = prompts.max_length + config.rollout.max_completion_length  # of the sequences that are trained
    evaluated = 0 if held_out is None else held_out.max_length + config.evaluation_length
    max_length = max(SHORTEST + 1, longest, evaluated)
    privileged = load_privileged(config, prompts.rows, tokenizer, setting)
    shown = privileged.max_length if privileged else 0
    max_shown = shown and shown - config.rollout.max_completion_length
    if config.teacher.url is not None:
        from grpo_core.data.served_teacher import check_served  # imports httpx2

        found = check_served(config, max(longest, shown))
        if accelerator.is_main_process:
            print(f"training: {found}", flush=True)
    taught = max(max_length, shown)  # what the teacher reads
    read = taught if config.teacher.is_policy else max_length
    adapts, bf16 = config.model.use_peft, config.train.mixed_precision == "bf16"
    keys = starting_model(config, run)
    load = partial(_load_model, config=config, accelerator=accelerator, images=loaded.images)
    base = load(keys, frozen=adapts, in_bf16=bf16 and adapts)
    check_lengths(base, read)
    model = with_adapter(base, keys)
    policy = _policy(model, config, accelerator, read)
    start = copy_of_trainable_state(policy.model) if keys.adapter and config.algorithm.beta else None
    average = None if config.teacher.update_rate is None else copy_of_trainable_state(model)
    engine = None if without_engine else make_engine(config, keys.name_or_path, policy.model, tokenizer, max_length)
    if engine is not None and keys.adapter:  # which the engine has not loaded
        engine.sync_weights(policy.model)
    _read_routers(policy, engine, config)
    set_seed(config.seed)  # after the engine, which seeds the process for itself
    reference = _reference(keys, config, load, max_length)
    teachers = _teachers(config, load, max(longest, shown))
    _check_divergence(config, policy, teachers)
    optimizer = make_optimizer(model, config.train)
    if accelerator.is_main_process:
        for note in [*base_notes(config.model), *fallbacks(engine, policy)]:
            print(note, flush=True)
    return Session(
        config=config,
        plan=plan,
        accelerator=accelerator,
        prompts=prompts,
        held_out=held_out,
        scoring=Scoring(tokenizer, rewards, setting),
        model=model,
        policy=policy,
        reference=reference,
        teachers=teachers,
        privileged=privileged,
        optimizer=optimizer,
        learning_rate=partial(learning_rate, config.train, plan),
        memory=OutOfMemoryRetry(
            first_limit(config, plan, prompts.max_length, accelerator, max_shown),
            policy,
            longest,
            shows=config.teacher.diverges and shown > longest,
        ),
        sampler=None if engine is None else _sampler(engine, config, setting, prompts, max_length),
        start=start,
        average=average,
        rates=None if demonstrations else _first_rates(run, config, len(prompts.rows)),
        demonstrations=demonstrations,
    )


@contextmanager
def holding(session: Session, weights: dict[str, Tensor]) -> Iterator[None]:
    """Inside, the policy computes with these weights, in the place of its own: a stop waits until they are back."""
    with uninterrupted(), other_weights(session.policy.model, weights):
        yield


@contextmanager
def teaching(session: Session) -> Iterator[list[Policy]]:
    """Yield the models that teach, in the order of their numbers: those that are loaded, else the policy, with its
    weights as they are or, inside, with their average."""
    with nullcontext() if session.average is None else holding(session, session.average):
        yield [*session.teachers.values()] or [session.policy.whole(session.policy.temperature)]


def _policy(model: Any, config: RunConfig, accelerator: Accelerator, max_length: int) -> Policy:
    bf16 = config.train.mixed_precision == "bf16"
    policy = Policy(
        model,
        config.rollout.temperature,
        max_length=max_length,
        bf16=bf16,
        gradient_checkpointing=config.train.gradient_checkpointing,
        torch_compile=config.train.torch_compile,
    )
    if accelerator.device.type in FUSED and policy.output_layer is not None:
        from grpo_core.model.fused_logprobs import compile_kernels

        compile_kernels(
            len(policy.output_layer.weight),
            torch.bfloat16 if bf16 else torch.float32,
            accelerator.device,
            entropy_gradient=config.algorithm.has_entropy_bonus,
        )
    sampling = training_sampling(config.rollout)
    policy.floor = partial(lowest_kept, sampling=sampling) if sampling.is_truncated else None
    policy.packs = not any_process(not policy.packs)  # processes divide rows by the cost of a pass, so they must agree
    return policy


def _read_routers(policy: Policy, engine: Engine | None, config: RunConfig) -> None:
    """Let the policy's routers be read if keys ask for that, or if their choices may be compared with the engine's.
    Raises ConfigError if a key asks for routers and there are none, or cannot be read."""
    asking = config.algorithm.router_keys
    samples = isinstance(engine, TransformersEngine) and not config.environment.is_used
    if asking or (samples and not config.train.torch_compile):
        with nullcontext() if asking else suppress(ConfigError):
            policy.routers = routers_of(policy.model, asking)
    policy.replays_routes = config.algorithm.routing_replay
    if isinstance(engine, TransformersEngine) and samples and policy.routers:
        engine.routers = routers_of(engine.model)


def _first_rates(run: Path, config: RunConfig, num_prompts: int) -> PassRates | None:
    if config.data.curriculum.begins_with_probe:
        return read_rates(run / run_files.PROBED, num_prompts)
    return no_rates(num_prompts) if has_pass_rates(config) else None


def _sampler(engine: Any, config: RunConfig, setting: Setting | None, prompts: Prompts, max_length: int) -> Sampler:
    lookahead = None
    if config.rollout.max_staleness:
        lookahead = engine if setting is None else ConversationsAhead(engine, setting, prompts)
    contexts, continuations = from_main(probe_batch(engine, prompts.ids, max_length - 1))
    probe = Probe(contexts, continuations, config.train.mixed_precision, config.rollout.max_sync_drift)
    return Sampler(engine, lookahead, probe)


def _load_model(
    keys: ModelConfig,
    config: RunConfig,
    accelerator: Accelerator,
    images: Images | None,
    *,
    frozen: bool,
    in_bf16: bool,
) -> Any:
    """Load a model, or this process's shard of it, on this process's device."""
    return load_model(
        keys.name_or_path,
        keys.revision,
        dtype=torch.bfloat16 if in_bf16 else torch.float32,
        device=accelerator.device,
        shard=sharding(config.train, frozen=frozen),
        in_4bit=keys.load_in_4bit,
        images=images,
    )


def _reference(keys: ModelConfig, config: RunConfig, load: Callable[..., Any], max_length: int) -> Policy | None:
    """Load the model that the training begins with, frozen, if the KL term needs a copy of it; with float32 masters if
    it follows the policy."""
    if config.algorithm.beta == 0 or config.model.use_peft:
        return None
    bf16, moves = config.train.mixed_precision == "bf16", config.algorithm.sync_ref_model
    model = load(keys, frozen=True, in_bf16=bf16 and not moves)
    return Policy(model.requires_grad_(False), config.rollout.temperature, max_length=max_length, bf16=bf16 and moves)


def _check_divergence(config: RunConfig, policy: Policy, teachers: Mapping[str, Policy]) -> None:
    """Raises ConfigError if the divergence from a teacher cannot be computed in chunks, or not on so many tokens."""
    if not config.teacher.diverges:
        return
    for name, model in [(config.model.name_or_path, policy), *teachers.items()]:  # a base may teach its own adapter
        if (layer := model.output_layer) is None:
            way_out = "remove it"
            if model is policy and config.model.lora_target_modules:
                way_out += (
                    ", or, if one of model.lora_target_modules is the output layer, name that in "
                    "model.lora_modules_to_save instead"
                )
            raise ConfigError(
                f"teacher.divergence_beta={config.teacher.divergence_beta:g} with {name!r}: {OWN_LOGITS}; {way_out}"
            )
        check_top_k(config, len(layer.weight))


def _teachers(config: RunConfig, load: Callable[..., Any], longest: int) -> dict[str, Policy]:
    """Load the teachers by name, frozen, on the path of the reference; none if a server has the teacher, and if the
    policy teaches itself. `longest`: tokens of the longest sequence that is trained, which evaluations may exceed."""
    bf16, found = config.train.mixed_precision == "bf16", dict[str, Policy]()
    for key, keys in loaded_teachers(config).items():
        model = load(keys, frozen=True, in_bf16=bf16)
        check_positions(config, f"{key} = {keys.name_or_path!r}", usable_positions(model.config), longest)
        found[keys.name_or_path] = Policy(model.requires_grad_(False), config.rollout.temperature, max_length=longest)
    return found
