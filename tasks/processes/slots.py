"""How trainings and evaluations share GPUs: slots of a concurrency limit of Prefect's server, then GPUs of a machine.

The limit's slots count GPUs. A stage takes one per GPU that it uses, or one where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress

from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound

from grpo_core.config.run import RunConfig
from tasks.processes.gpu_locks import own_gpus, visible_gpus
from tasks.stages.errors import StageError

GPU_LIMIT = "grpo-training"  # global concurrency limit: as many slots as there are GPUs
# Limit with one slot: the stage that has it takes slots of GPU_LIMIT next. While it waits for many, others do not take
# the few that are free.
TURN = "grpo-training-turn"
LEASE_SECONDS = 60.0


@contextmanager
def gpus(config: RunConfig, launched: bool) -> Iterator[None]:
    """Hold the slots of a stage, and the GPUs of this machine that it uses.

    `launched`: whether the stage's processes are as many as the training's; otherwise it has one.
    """
    processes = config.train.num_processes if launched else 1
    servers = config.rollout.server_gpus
    here = 0 if config.servers_elsewhere else servers
    here += processes if config.launch.launcher == "local" else 0
    visible = visible_gpus()
    with slots(processes + servers if visible else 1), own_gpus(here, get_run_logger().info):
        yield


@contextmanager
def slots(count: int) -> Iterator[None]:
    """Hold so many slots of GPU_LIMIT, if the server has that limit; log if they have to be waited for. A stage that
    waits is not overtaken by one that comes later and wants fewer.

    A process that is killed loses its slots LEASE_SECONDS later. Raises StageError if the limit has fewer.
    """
    with get_client(sync_client=True) as client, suppress(ObjectNotFound):
        limit = client.read_global_concurrency_limit_by_name(GPU_LIMIT)
        if limit.active and count > limit.limit:
            raise StageError(
                f"the stage takes {count} slots, one per GPU, and the concurrency limit {GPU_LIMIT} has {limit.limit}: "
                f"if there are as many GPUs, `prefect gcl update {GPU_LIMIT} --limit {count}`, or more"
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
        turn.enter_context(_held(TURN, 1))
        with _held(GPU_LIMIT, count):
            turn.close()
            yield


def _held(limit: str, count: int) -> AbstractContextManager[None]:
    return concurrency(limit, occupy=count, lease_duration=LEASE_SECONDS, raise_on_lease_renewal_failure=False)
