"""Slots of our concurrency limits that nobody holds: Prefect counts a slot as taken before it writes the lease that
frees it again, so a full disk or a kill in between would keep every later stage waiting."""

from __future__ import annotations

from collections import Counter
from uuid import UUID

from prefect.server.concurrency.lease_storage import get_concurrency_lease_storage
from prefect.server.database import provide_database_interface
from prefect.server.models.concurrency_limits_v2 import bulk_decrement_active_slots, bulk_read_concurrency_limits

from tasks.processes.slots import GPU_LIMIT, TURN

MOST_LEASES = 10_000


async def free_lost_slots() -> None:
    """Free the slots that no lease holds. To be called in the server's process, when the database is made."""
    leases, held = get_concurrency_lease_storage(), Counter[UUID]()
    active = await leases.read_active_lease_ids(MOST_LEASES)
    for lease_id in [*active, *await leases.read_expired_lease_ids(MOST_LEASES)]:
        if (lease := await leases.read_lease(lease_id)) and lease.metadata:
            held.update(dict.fromkeys(lease.resource_ids, lease.metadata.slots))
    async with provide_database_interface().session_context(begin_transaction=True) as session:
        for limit in await bulk_read_concurrency_limits(session=session, names=[GPU_LIMIT, TURN]):
            if (lost := limit.active_slots - held[limit.id]) > 0:
                await bulk_decrement_active_slots(session=session, concurrency_limit_ids=[limit.id], slots=lost)
