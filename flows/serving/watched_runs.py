"""What the crash watch remembers of flow runs while no server runs: heartbeats stop for that time, and events that the
last server had not handled when it ended are lost, such as an interrupted run's AwaitingRetry."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

import sqlalchemy
from prefect.server.database import provide_database_interface
from prefect.server.schemas.states import StateType

from flows.serving.server_setup import CRASH_WATCH, LONGEST_SILENCE

OF_A_PROCESS = {StateType.PENDING, StateType.RUNNING, StateType.CANCELLING}


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
