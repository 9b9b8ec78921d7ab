"""Slots of the GPU limit that no lease holds: Prefect counts a slot as taken before it writes the lease that
frees it again, so a full disk or a kill in between would keep every later stage waiting."""

from __future__ import annotations

import asyncio
from collections import Counter
from uuid import UUID

from prefect.server.concurrency.lease_storage import get_concurrency_lease_storage
from prefect.server.database import provide_database_interface
from prefect.server.models.concurrency_limits_v2 import bulk_decrement_active_slots, bulk_read_concurrency_limits

from tasks.processes.slots import GPU_LIMIT

MOST_LEASES = 10_000
LEASE_SECONDS = 2.0  # in which a slot that was counted has its lease


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
