"""One generation batch, from prompts to rollout: sample, score, compare within groups; divided among all processes."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_core.algorithm.advantages import Advantages, group_advantages, sample_std
from grpo_core.config.algorithm import AlgorithmConfig
from grpo_core.config.metrics import of_source
from grpo_core.config.run import RunConfig
from grpo_core.data.chat import decode_completions, text_of
from grpo_core.data.order import Group, Schedule, source_rows
from grpo_core.data.prompts import Prompts, rows_at
from grpo_core.distributed import gathered, own_range, processes_per_machine
from grpo_core.environments.conversation import Said, conversation_metrics
from grpo_core.environments.processes import Environment
from grpo_core.environments.setting import Setting
from grpo_core.errors import NotFiniteError, RolloutError
from grpo_core.model.sequences import pad
from grpo_core.planning.plan import Plan
from grpo_core.rewards.batch import Batch
from grpo_core.rewards.composition import counted, passed
from grpo_core.rewards.contract import Reward
from grpo_core.rewards.scoring import score_arriving
from grpo_core.rewards.trl_arguments import UNKNOWN_PLAN, Logged, TrainerState
from grpo_core.rollout.ahead import Ahead, TakingSampler, windows
from grpo_core.rollout.answers import Answer, completions_of, conversations_of
from grpo_core.rollout.batch_metrics import (
    TOKENS,
    age_metrics,
    length_metrics,
    logged_metrics,
    reward_metrics,
    work_metrics,
)
from grpo_core.rollout.requests import group_requests, training_sampling
from grpo_core.rollout.types import Completion, Engine, GenerationBatch, Request, Sampler, Sampling
from grpo_core.system.progress import phase, seconds_of_work


@dataclass(frozen=True)
class Sample:
    """One scored completion, as it travels between processes and into the records."""

    row: int  # of the dataset
    prompt_ids: list[int]
    completion: Completion
    text: str  # of a conversation, the policy's last words
    rewards: list[float]  # K, NaN for None
    said: Said | None = None  # in a conversation with tools or an environment
    place: int = 0  # index among all completions that its process has asked for
    turn: int = 0  # the generation batch whose turn the row was
    logged: Logged = field(default_factory=Logged)  # by the rewards
    taught: list[float] | None = None  # a served teacher's log-probabilities, if the recording has them


@dataclass(frozen=True)
class Scoring:
    """What turns sampled tokens into rewards: the tokenizer that reads them as text, the reward functions, the place in
    the training that these are told and, if each completion is a conversation, its environments."""

    tokenizer: Any
    rewards: Sequence[Reward]
    setting: Setting | None = None
    state: TrainerState = UNKNOWN_PLAN


@dataclass(frozen=True)
class BatchRequest:
    """Generation batch `index`, which is to be sampled. Another `attempt` draws other samples of the same prompts."""

    index: int
    schedule: Schedule
    config: RunConfig
    prompts: Prompts
    scoring: Scoring
    engine: Engine
    attempt: int = 0


@dataclass(frozen=True)
class _Draw:
    """Scored completions of some groups, G of each, over all processes."""

    samples: list[Sample]
    generate_seconds: float
    score_seconds: float
    work: list[dict[str, float]]  # of each process, see work_metrics


def collect(
    request: BatchRequest, groups: Ahead | Sequence[Group] = ()
) -> tuple[GenerationBatch, list[Sample], list[Group]]:
    """Return a generation batch, its samples in the same order, and the groups that are begun but not in it.

    Every process samples and scores its part, and all get the whole. `groups`: groups sampled ahead to take from, or
    groups to sample now (default: those scheduled for this batch).
    """
    if isinstance(groups, Ahead):
        first, left = _take(request, groups)
    else:
        first, left = _draw(request, groups or request.schedule.groups(request.index)), []
    samples, draws, resampling = first.samples, [first], dict[str, float]()
    if request.config.rollout.dynamic_sample:
        samples, others = _replace_silent(request, samples)
        draws += others
        first_reward = _advantages(first.samples, request.config).rewards.nanmean().item()
        if not math.isnan(first_reward):
            resampling["dynamic_sampling/first_reward"] = first_reward
        resampling["dynamic_sampling/resampled_groups"] = (
            sum(len(draw.samples) for draw in others) / request.schedule.plan.num_generations
        )
    work = [sum(map(Counter, own), Counter()) for own in zip(*(draw.work for draw in draws), strict=True)]
    metrics = {
        **conversation_metrics([sample.said for sample in samples if sample.said]),
        "time/generate": sum(draw.generate_seconds for draw in draws),
        "time/score": sum(draw.score_seconds for draw in draws),
        **work_metrics(work, processes_per_machine()),
        **resampling,
    }
    sampled = [sample for draw in draws for sample in draw.samples]
    return generation_batch(request.index, request.schedule, request.config, samples, sampled, metrics), samples, left


def _draw(request: BatchRequest, groups: Sequence[Group]) -> _Draw:
    """Sample the groups now."""
    return _scored(request, request.engine, groups, own_range(len(groups) * request.config.rollout.num_generations))


def _take(request: BatchRequest, ahead: Ahead) -> tuple[_Draw, list[Group]]:
    """Take as many groups that are sampled ahead as a generation batch has. Returns them, and the groups left."""
    process = PartialState()
    begun = windows(ahead, request.schedule, request.index, process.num_processes)
    window = begun[process.process_index]
    sampler = TakingSampler(ahead, len(own_range(request.schedule.plan.prompts_per_generation)))
    draw = _scored(request, sampler, window, range(len(window) * request.config.rollout.num_generations))
    taken = {(sample.turn, sample.row) for sample in draw.samples}
    return draw, [group for window in begun for group in window if group not in taken]


def _scored(request: BatchRequest, sampler: Sampler, groups: Sequence[Group], mine: range) -> _Draw:
    """Return all processes' samples of their groups, and of this one's the completions `mine`."""
    config, start = request.config, time.perf_counter()
    requests = group_requests(config, request.prompts, groups, mine, request.attempt)
    turns = [groups[completion // config.rollout.num_generations][0] for completion in mine]

    def sample() -> tuple[list[Sample], float]:
        sampling = training_sampling(config.rollout)
        found, seconds = sample_and_score(sampler, requests, sampling, request.prompts, request.scoring)
        return [replace(each, turn=turns[each.place]) for each in found], seconds

    samples, generating, work = share_samples(sample)
    return _Draw(samples, generating, time.perf_counter() - start - generating, work)


def _replace_silent(request: BatchRequest, samples: Sequence[Sample]) -> tuple[list[Sample], list[_Draw]]:
    """Return the samples with other prompts' groups in the place of those whose completions all have the same reward,
    replaced as often as the configuration allows, and all that was drawn for that."""
    g, samples, draws = request.config.rollout.num_generations, [*samples], list[_Draw]()
    used = {*request.schedule.prompts(request.index), *(sample.row for sample in samples)}
    for _ in range(request.config.rollout.max_resample_times):
        silent = (_advantages(samples, request.config).group_std == 0).nonzero().flatten().tolist()
        found = request.schedule.fresh(request.index, used, [samples[group * g].row for group in silent])
        fresh = {group: row for group, row in zip(silent, found, strict=True) if row is not None}
        if not fresh:
            break
        used.update(fresh.values())
        draws.append(_draw(request, [(request.index, row) for row in fresh.values()]))
        for group, start in zip(fresh, range(0, len(draws[-1].samples), g), strict=True):
            samples[group * g : (group + 1) * g] = draws[-1].samples[start : start + g]
    return samples, draws


def generation_batch(
    index: int,
    schedule: Schedule,
    config: RunConfig,
    samples: Sequence[Sample],
    sampled: Sequence[Sample],
    metrics: dict[str, float],
) -> GenerationBatch:
    """Make generation batch `index` of `samples`, groups in a row, with advantages. `sampled`: these, and those of
    groups that were replaced; `metrics`: of the sampling.

    Raises NotFiniteError if the log-probability of a token is not finite.
    """
    advantages, completions = _advantages(samples, config), [sample.completion for sample in samples]
    metrics = {
        **_metrics_of(range(len(samples)), samples, advantages, config.rollout.num_generations),
        **reward_metrics(config.rewards, _matrix(samples)),
        **logged_metrics([sample.logged for sample in sampled]),
        **_source_metrics(samples, advantages, schedule.plan),
        **age_metrics(completions),
        **metrics,
    }
    sampling_logprobs = pad([completion.logprobs for completion in completions], torch.float32)
    if not sampling_logprobs.isfinite().all():
        raise NotFiniteError(f"rollout {index}: the policy's log-probabilities of its own samples are not finite")
    trained = [_trained_mask(completion, config.algorithm) for completion in completions]
    return GenerationBatch(
        index=index,
        scheduled_rows=schedule.prompts(index),
        prompt_ids=[sample.prompt_ids for sample in samples],
        completion_ids=pad([completion.ids for completion in completions], torch.int64),
        completion_mask=pad(trained, torch.float32),
        completion_lengths=torch.tensor([len(completion.ids) for completion in completions]),
        truncated=torch.tensor([completion.truncated for completion in completions]),
        sampling_logprobs=sampling_logprobs,
        advantages=advantages.advantages,
        sampled_completions=len(sampled),
        sampled_tokens=sum(sample.completion.sampled_tokens for sample in sampled),
        sampled_rows=torch.tensor([sample.row for sample in sampled]),
        passed=torch.from_numpy(passed(_matrix(sampled), config, sources_of(sampled, schedule.plan))),
        metrics=metrics,
        routes=_padded_routes(completions),
    )


def _metrics_of(places: Sequence[int], samples: Sequence[Sample], advantages: Advantages, g: int) -> dict[str, float]:
    """Metrics of rewards and lengths of the samples at these places, which are whole groups; none of the rewards' if
    no function scored one of them."""
    rewards = advantages.rewards[[*places]]
    is_scored = ~rewards.isnan()
    is_silent = advantages.group_std[[place // g for place in places[::g]]] == 0
    return {
        **({"reward": rewards.nanmean().item(), "reward_std": sample_std(rewards).item()} if is_scored.any() else {}),
        "frac_unscored": 1 - is_scored.float().mean().item(),
        "frac_reward_zero_std": is_silent.float().mean().item(),
        **length_metrics([samples[place].completion for place in places]),
    }


def _source_metrics(samples: Sequence[Sample], advantages: Advantages, plan: Plan) -> dict[str, float]:
    """Metrics of each source that has completions in the batch."""
    metrics = {}
    for source, rows in zip(plan.sources, source_rows(plan), strict=False):
        if own := [place for place, sample in enumerate(samples) if sample.row in rows]:
            metrics |= of_source(_metrics_of(own, samples, advantages, plan.num_generations), source.name)
    return metrics


def sources_of(samples: Sequence[Sample], plan: Plan) -> list[str | None]:
    """Name of each sample's source; None without sources."""
    ends, names = [rows.stop for rows in source_rows(plan)], [source.name for source in plan.sources] or [None]
    return [names[bisect_right(ends, sample.row)] for sample in samples]


def _matrix(samples: Sequence[Sample]) -> np.ndarray:
    """Values of the rewards, NaN for None. (B, K)"""
    return np.array([sample.rewards for sample in samples], dtype=np.float64)


def _advantages(samples: Sequence[Sample], config: RunConfig) -> Advantages:
    return group_advantages(
        torch.from_numpy(counted(_matrix(samples), config.rewards)),
        torch.tensor([reward.weight for reward in config.rewards], dtype=torch.float64),
        config.rollout.num_generations,
        config.algorithm.scale_rewards,
        aggregation=config.algorithm.multi_objective_aggregation,
        estimator=config.algorithm.advantage_estimator,
    )


def sample_and_score(
    engine: Sampler,
    requests: Sequence[Request],
    sampling: Sampling,
    prompts: Prompts,
    scoring: Scoring,
) -> tuple[list[Sample], float]:
    """Return the requests' completions, scored, and the seconds until the last was sampled.

    Asynchronous rewards work on the requests that are finished while the others are sampled. A conversation whose
    environment fails gets None from every reward.
    """
    setting = scoring.setting
    start, ended = time.perf_counter(), 0.0
    failed, held = list[Answer](), list[Environment]()

    def sampled() -> Generator[list[Answer], None, None]:
        nonlocal ended
        answers = (
            completions_of(engine, requests, sampling)
            if setting is None
            else conversations_of(engine, requests, sampling, prompts, setting)
        )
        for found in answers:
            held.extend(answer.conversation.environment for answer in found if answer.conversation)
            failed.extend(answer for answer in found if answer.has_failed)
            yield [answer for answer in found if not answer.has_failed]
        ended = time.perf_counter()

    def batch_of(answers: list[Answer]) -> Batch:
        data = rows_at(prompts.rows, [answer.row for answer in answers])
        ids = [answer.completion.ids for answer in answers]
        if setting is None:
            asked = [answer.prompt_ids for answer in answers]
            texts = decode_completions(data, asked, ids, scoring.tokenizer, sampling.stop)
            return Batch(data, texts, ids, state=scoring.state, images=prompts.images)
        talks = [answer.conversation for answer in answers if answer.conversation]
        seen = [setting.seen(each) for each in talks]
        return Batch(data, [each.said.messages for each in talks], ids, seen, scoring.state)

    try:
        answers, batch, columns, logged = score_arriving(scoring.rewards, sampled(), batch_of)
    finally:
        if setting is not None:
            setting.environments.free(held)
    scored = zip(answers, batch.completions, zip(*columns, strict=True), logged, strict=False)
    samples = {
        answer.place: _sample(answer, text_of(written), list(values), said) for answer, written, values, said in scored
    }
    samples |= {answer.place: _sample(answer, "", [math.nan] * len(scoring.rewards), Logged()) for answer in failed}
    return [samples[place] for place in sorted(samples)], ended - start


def _sample(answer: Answer, text: str, rewards: list[float], logged: Logged) -> Sample:
    said = answer.conversation.said if answer.conversation else None
    return Sample(answer.row, answer.prompt_ids, answer.completion, text, rewards, said, answer.place, logged=logged)


@phase("sampling")
def share_samples(
    draw: Callable[[], tuple[list[Sample], float]],
) -> tuple[list[Sample], float, list[dict[str, float]]]:
    """Samples of all processes, the seconds of this one, and each one's work since the last call, for `work_metrics`.
    Raises RolloutError in all processes if one raises it."""
    drawn: Sequence[Sample | RolloutError]
    try:
        drawn, seconds = draw()
    except RolloutError as error:
        drawn, seconds = [error], 0.0
    tokens = sum(len(sample.completion.ids) for sample in drawn if isinstance(sample, Sample))
    shares = gathered([([*drawn], seconds_of_work() | {TOKENS: float(tokens)})])
    found = [sample for share, _ in shares for sample in share]
    for problem in found:
        if isinstance(problem, RolloutError):
            raise problem
    return [sample for sample in found if isinstance(sample, Sample)], seconds, [work for _, work in shares]


def _trained_mask(completion: Completion, config: AlgorithmConfig) -> list[int]:
    """Mask with 1 per token that is trained, and 0 per token of an environment or, with mask_truncated_completions, of
    a completion that was cut off."""
    if config.mask_truncated_completions and completion.truncated:
        return [0] * len(completion.ids)
    return [1] * len(completion.ids) if completion.mask is None else completion.mask


def _padded_routes(completions: Sequence[Completion]) -> Tensor | None:
    """The engine's experts of each token, zeros on the right (B, L, F); None unless it says them of each completion."""
    routes = [torch.from_numpy(each.routes) for each in completions if each.routes is not None]
    return pad_sequence(routes, batch_first=True) if len(routes) == len(completions) else None
