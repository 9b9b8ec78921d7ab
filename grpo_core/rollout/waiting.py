"""How long one process may wait for another."""

from __future__ import annotations

from datetime import timedelta

from grpo_core.config.run import RunConfig
from grpo_core.rewards.isolated import START_SECONDS
from grpo_core.rollout.vllm.client import ATTEMPTS

UNLIMITED_WORK = timedelta(hours=1)  # for what no key limits: loading, compiling, sampling, writing a checkpoint
LONGEST_WAIT = timedelta(days=365)


def longest_wait(config: RunConfig) -> timedelta:
    """How long one process may wait for another before that counts as an error: longer than the configuration lets
    sampling and scoring of a batch take, with UNLIMITED_WORK for what it does not limit.

    A failing call of a reward is repeated to find the completion that makes it fail. A process that dies is not waited
    for that long: the launcher ends the others.
    """
    rollout = config.rollout
    scoring = sum(2 * (reward.timeout + START_SECONDS) for reward in config.rewards)
    answer = ATTEMPTS * (rollout.vllm_server_timeout + 2 * rollout.vllm_request_timeout)
    sampling = answer if rollout.engine == "vllm-server" else 0.0
    return UNLIMITED_WORK + timedelta(seconds=min(scoring + sampling, LONGEST_WAIT.total_seconds()))
