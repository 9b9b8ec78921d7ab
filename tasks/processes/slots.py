"""Lets trainings and evaluations share GPUs: by slots of a concurrency limit on Prefect's server, then by locks on a
machine's GPUs.

The limit's slots count GPUs. A stage takes one per GPU that it uses, or one on a machine without GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress

from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound

from grpo_core.config.run import RunConfig
from grpo_core.planning.nvidia import problem_of_driver, visible_devices
from tasks.processes.gpu_locks import own_gpus
from tasks.stages.errors import StageError

GPU_LIMIT = "grpo-training"  # global concurrency limit: as many slots as there are GPUs
# Limit with one slot: the stage that holds it takes slots of GPU_LIMIT next. While that stage waits for many slots,
# others cannot take the few that are free.
TURN = "grpo-training-turn"
LEASE_SECONDS = 60.0


@contextmanager
def hold_gpus(config: RunConfig) -> Iterator[None]:
    """Hold the slots of a stage that starts the configured processes, and the GPUs of this machine that it uses."""
    processes, servers = config.train.num_processes, config.rollout.server_gpus
    here = 0 if config.servers_elsewhere else servers
    here += processes if config.launch.launcher == "local" else 0
    if problem := problem_of_driver():
        get_run_logger().warning(problem)
    with hold_slots(processes + servers if visible_devices() else 1), own_gpus(here, get_run_logger().info):
        yield


@contextmanager
def hold_slots(count: int) -> Iterator[None]:
    """Hold `count` slots of GPU_LIMIT, if the server has that limit; wait for them if necessary, and log that. A stage
    that waits is not overtaken by a later one that needs fewer.

    If the process is killed, its slots are freed LEASE_SECONDS later. Raises StageError if the limit has fewer slots.
    """
    with get_client(sync_client=True) as client, suppress(ObjectNotFound):
        limit = client.read_global_concurrency_limit_by_name(GPU_LIMIT)
        if limit.active and count > limit.limit:
            raise StageError(
                f"the stage takes {count} slots, one per GPU, but the concurrency limit {GPU_LIMIT} has {limit.limit}: "
                f"if there are enough GPUs, raise it: `prefect gcl update {GPU_LIMIT} --limit {count}`"
            )
        if limit.active and limit.active_slots + count > limit.limit:
            get_run_logger().info(
                "waiting for %d slots of the concurrency limit %s: %d of %d are taken, %d are free",
                count,
                GPU_LIMIT,
                limit.active_slots,
                limit.limit,
                max(0, limit.limit - limit.active_slots),
            )
        elif limit.active and client.read_global_concurrency_limit_by_name(TURN).active_slots:
            get_run_logger().info("waiting for the turn: another stage takes slots of %s first", GPU_LIMIT)
    with ExitStack() as turn:
        turn.enter_context(_hold(TURN, 1))
        with _hold(GPU_LIMIT, count):
            turn.close()
            yield


def _hold(limit: str, count: int) -> AbstractContextManager[None]:
    return concurrency(limit, occupy=count, lease_duration=LEASE_SECONDS, raise_on_lease_renewal_failure=False)
