"""Lets trainings and evaluations share GPUs: by slots of a concurrency limit on Prefect's server, in the order of the
storage's line, then by locks on a machine's GPUs.

The limit's slots count GPUs. A stage takes one per GPU that it uses, or one on a machine without GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.client.schemas.responses import GlobalConcurrencyLimitResponse
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run

from grpo_core.config.run import RunConfig
from grpo_core.planning.nvidia import problem_of_driver, visible_devices
from tasks.processes.gpus.line import Line, Place
from tasks.processes.gpus.locks import own_gpus
from tasks.stages.errors import StageError
from tasks.stages.prefect_address import HTTP_ERROR

GPU_LIMIT = "grpo-training"  # global concurrency limit: as many slots as there are GPUs
LEASE_SECONDS = 60.0
LOOK_SECONDS = 2.0  # between looks at the line and the limit
TAKE_SECONDS = 5.0  # to take free slots; another storage's stage may be faster

# Place of the training that this process has ended: its evaluation goes next, before any other run's training.
_kept: list[Place] = []


@contextmanager
def hold_gpus(config: RunConfig, is_training: bool) -> Iterator[None]:
    """Hold the slots of a stage that starts the configured processes, and the GPUs of this machine that it uses."""
    processes, servers = config.train.num_processes, config.rollout.server_gpus
    here = 0 if config.servers_elsewhere else servers
    here += processes if config.launch.launcher == "local" else 0
    if problem := problem_of_driver():
        get_run_logger().warning(problem)
    count = processes + servers if visible_devices() else 1
    with hold_slots(count, config.name, is_training, config.launch.priority), own_gpus(here, get_run_logger().info):
        yield


@contextmanager
def hold_slots(count: int, run: str, is_training: bool, priority: int) -> Iterator[None]:
    """Hold `count` slots of GPU_LIMIT, if the server has that limit; wait in line for them if necessary, and log that.
    A stage that waits for many is not overtaken by a later one that needs fewer. After a training, the place in line is
    kept for its evaluation until this process ends.

    If the process is killed, its slots are freed LEASE_SECONDS later. Raises StageError if the limit has fewer slots.
    """
    since = _arrival()
    with ExitStack() as stack:
        place = _kept.pop() if _kept else Place(run)
        stack.callback(place.leave)
        place.wait(is_training, priority, since)
        with ExitStack() as slots:
            _take_slots(slots, place, count)
            place.hold()
            yield
            if is_training:  # before its slots are free
                place.wait(False, priority, since)
                _kept.append(place)
                stack.pop_all()


def _take_slots(slots: ExitStack, place: Place, count: int) -> None:
    """Take the slots once this stage is first in line and there are enough. `slots` gives them back. Takes none if
    there is no limit, or it is switched off, also while this waits."""
    held = {"occupy": count, "lease_duration": LEASE_SECONDS, "raise_on_lease_renewal_failure": False}
    said = ""
    while True:
        line = place.look()
        try:
            if (limit := _read_limit()) is None or not limit.active:
                return
            if count > limit.limit:
                raise StageError(
                    f"the stage takes {count} slots, one per GPU, but the concurrency limit {GPU_LIMIT} has "
                    f"{limit.limit}: if there are enough GPUs, raise it: `prefect gcl update {GPU_LIMIT} --limit "
                    f"{count}`"
                )
            if not line.before and limit.active_slots + count <= limit.limit:
                with suppress(TimeoutError):
                    slots.enter_context(concurrency(GPU_LIMIT, timeout_seconds=TAKE_SECONDS, **held))
                    return
            text = _describe(line, limit, count)
        except HTTP_ERROR as error:
            text = f"waiting for Prefect's server, which does not answer: {error}"
        if text != said:
            get_run_logger().info("%s", text)
            said = text
        time.sleep(LOOK_SECONDS)


def _describe(line: Line, limit: GlobalConcurrencyLimitResponse, count: int) -> str:
    by = f" (by {', '.join(line.holders)})" if line.holders else ""
    after = f", after {', '.join(line.before)}" if line.before else ""
    return (
        f"waiting for {count} slot{'s' * (count > 1)} of the concurrency limit {GPU_LIMIT}: {limit.active_slots} of "
        f"{limit.limit} taken{by}; number {len(line.before) + 1} in line{after}"
    )


def _read_limit() -> GlobalConcurrencyLimitResponse | None:
    with get_client(sync_client=True) as client, suppress(ObjectNotFound):
        return client.read_global_concurrency_limit_by_name(GPU_LIMIT)
    return None


def _arrival() -> float:
    """When this flow run was due for the first time, in seconds since the epoch: one that is interrupted, or retried,
    keeps its place. Now, outside of a flow run."""
    if flow_run.id is None:
        return time.time()
    with get_client(sync_client=True) as client:
        due = client.read_flow_run(UUID(flow_run.id)).expected_start_time
    return due.timestamp() if due else time.time()
