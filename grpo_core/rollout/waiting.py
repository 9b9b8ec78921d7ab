"""Longest times that one process may wait for another."""

from __future__ import annotations

from datetime import timedelta

from grpo_core.config.run import RunConfig
from grpo_core.rewards.isolated import START_SECONDS
from grpo_core.system.progress import CHECKPOINT, REWARDS, SET_UP

UNLIMITED_WORK = timedelta(hours=1)  # for what no key limits: loading, compiling, sampling, writing a checkpoint
TEACHER = "teacher log-probabilities"  # phase
ATTEMPTS = 5  # at one answer of a vLLM server, at one server after the other


def longest_wait(config: RunConfig) -> timedelta:
    """Longest time that one process may wait for another; more is an error. It exceeds the time that the configuration
    lets sampling and scoring of a batch take, with UNLIMITED_WORK for what it does not limit.

    A failing call of a reward is repeated to find the completion that makes it fail. If a process dies, the launcher
    ends the others before this time.
    """
    waits = _answer_seconds(config), _teacher_seconds(config), _environment_seconds(config)
    limited = _scoring_seconds(config) + sum(waits)
    return UNLIMITED_WORK + timedelta(seconds=limited)


def phase_limits(config: RunConfig) -> dict[str, float]:
    """Seconds for which a process may stand still in a phase by the configured time limits, by the phase's name; in
    set-up and checkpoints, as long as a slow disk may take."""
    answer = _answer_seconds(config)
    unlimited = UNLIMITED_WORK.total_seconds()
    scoring = _scoring_seconds(config)
    limits = {SET_UP: unlimited, REWARDS: scoring, "sampling": answer, "weight sync": answer, CHECKPOINT: unlimited}
    return {**limits, TEACHER: _teacher_seconds(config)}


def _scoring_seconds(config: RunConfig) -> float:
    return sum(2 * (reward.timeout + START_SECONDS * reward.isolated) for reward in config.rewards)


def _environment_seconds(config: RunConfig) -> float:
    """Seconds for which a process may wait for its environments, all of which work concurrently."""
    return config.environment.conversation_timeout if config.environment.is_used else 0.0


def _answer_seconds(config: RunConfig) -> float:
    """Seconds within which a server answers or is given up; 0 without servers."""
    return _server_seconds(config) if config.rollout.engine == "vllm-server" else 0.0


def _teacher_seconds(config: RunConfig) -> float:
    """Do as `_answer_seconds` for the server of a teacher; 0 without one."""
    return _server_seconds(config) if config.teacher.url is not None else 0.0


def _server_seconds(config: RunConfig) -> float:
    return ATTEMPTS * (config.rollout.vllm_server_timeout + 2 * config.rollout.vllm_request_timeout)
