"""What Prefect's server puts right in its database as it starts, after the last one was killed or its disk was full.

The crash watch remembers flow runs while no server runs: heartbeats stop for that time, and events that the last server
had not handled when it ended are lost, such as an interrupted run's AwaitingRetry. And Prefect counts a slot as taken
before it writes the lease that frees it again, so an end in between would keep every later stage waiting.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime
from uuid import UUID

import sqlalchemy
from prefect.server.concurrency.lease_storage import get_concurrency_lease_storage
from prefect.server.database import provide_database_interface
from prefect.server.models.concurrency_limits_v2 import bulk_decrement_active_slots, bulk_read_concurrency_limits
from prefect.server.schemas.states import StateType

from flows.serving.server_setup import CRASH_WATCH, LONGEST_SILENCE
from tasks.processes.gpus.slots import GPU_LIMIT

OF_A_PROCESS = {StateType.PENDING, StateType.RUNNING, StateType.CANCELLING}
MOST_LEASES = 10_000
LEASE_SECONDS = 2.0  # in which a slot that was counted has its lease


async def renew_crash_watch() -> None:
    """Give each flow run that a process works on the time of a new heartbeat to show that it lives, and forget the
    others: without this, the watch would call them crashed. To be called in the server's process, before its
    services start."""
    database = provide_database_interface()
    buckets, automations = database.AutomationBucket, database.Automation
    async with database.session_context(begin_transaction=True) as session:
        watch = sqlalchemy.select(automations.id).where(automations.name == CRASH_WATCH)
        watched = await session.scalars(sqlalchemy.select(buckets).where(buckets.automation_id.in_(watch)))
        for bucket in watched.all():
            run_id = UUID(bucket.bucketing_key[0].removeprefix("prefect.flow-run."))
            run = await session.get(database.FlowRun, run_id)
            if run and run.state_type in OF_A_PROCESS:
                bucket.end = datetime.now(UTC) + LONGEST_SILENCE
            else:
                await session.delete(bucket)


async def free_lost_slots() -> None:
    """Free the slots that no lease holds, as two looks in a row have found: another server over the same database may
    be between a slot and its lease. To be called in the server's process, when the database is made."""
    if not (lost := await _lost_slots()):
        return
    await asyncio.sleep(LEASE_SECONDS)
    lost &= await _lost_slots()
    async with provide_database_interface().session_context(begin_transaction=True) as session:
        for limit, slots in lost.items():
            await bulk_decrement_active_slots(session=session, concurrency_limit_ids=[limit], slots=slots)


async def _lost_slots() -> Counter[UUID]:
    """Number of slots of the limit, by its id, that no lease holds."""
    leases, held = get_concurrency_lease_storage(), Counter[UUID]()
    active = await leases.read_active_lease_ids(MOST_LEASES)
    for lease_id in [*active, *await leases.read_expired_lease_ids(MOST_LEASES)]:
        if (lease := await leases.read_lease(lease_id)) and lease.metadata:
            held.update(dict.fromkeys(lease.resource_ids, lease.metadata.slots))
    async with provide_database_interface().session_context() as session:
        limits = await bulk_read_concurrency_limits(session=session, names=[GPU_LIMIT])
        return +Counter({limit.id: limit.active_slots - held[limit.id] for limit in limits})
