"""`python examples/notifications/webhook.py URL`: runs of the pipeline that complete, fail or are overdue, promotions,
rollbacks, versions that wait for approval and champions that are old are POSTed to URL by Prefect.

Makes, or makes again, what can be edited in Prefect's UI: the block that holds the URL, and the automations.
`{"text": …}` is what chat services take. The events and their payloads: docs/reference/events.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast
from uuid import UUID

from prefect.automations import Automation
from prefect.blocks.webhook import Webhook
from prefect.events.actions import CallWebhook
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.exceptions import ObjectNotFound

AT_ONCE: dict[str, Any] = {"posture": Posture.Reactive, "threshold": 1, "within": timedelta(0)}
# Fires if none of the expected events follows one of those in `after` in time, about the same run or model.
MISSING: dict[str, Any] = {"posture": Posture.Proactive, "threshold": 1, "for_each": {"prefect.resource.id"}}
OF_PIPELINE = {"prefect.resource.role": "flow", "prefect.resource.name": "pipeline"}
ENDED = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Crashed", "Cancelled")}
NEW_CHAMPION = {"grpo.promoted", "grpo.rolled-back"}

BLOCK = "grpo-notifications"
FAILED = """\
{% set text = flow.name ~ ": run " ~ flow_run.name ~ " is " ~ flow_run.state.name ~ ". " ~ flow_run|ui_url %}\
{"text": {{ text | tojson }}}"""
OVERDUE = """\
{% set text = flow.name ~ ": run " ~ flow_run.name ~ " has no result yet. " ~ flow_run|ui_url %}\
{"text": {{ text | tojson }}}"""
FROM_EVENT = """{"text": {{ event.payload.text | tojson }}}"""
OLD = """\
{% set champion = event.payload.model ~ " version " ~ event.payload.version %}\
{"text": {{ (champion ~ " has been champion for long") | tojson }}}"""


def notify(url: str, age: timedelta, forecast: timedelta | None) -> None:
    """Have runs of the pipeline that end, promotions and rollbacks POSTed to `url`; champions when they reach `age`;
    runs without a result after twice the `forecast`."""
    block = cast(UUID, Webhook(method="POST", url=url).save(BLOCK, overwrite=True))
    for name, what, trigger, message in _automations(age, forecast):
        with suppress(ObjectNotFound, ValueError):  # none yet
            cast(Automation, Automation.read(name=name)).delete()  # a coroutine only where an event loop runs
        Automation(
            name=name,
            description=f"POSTs each {what} to the webhook block {BLOCK}.",
            trigger=trigger,
            actions=[CallWebhook(block_document_id=block, payload=message)],
        ).create()


def _automations(age: timedelta, forecast: timedelta | None) -> Iterator[tuple[str, str, EventTrigger, str]]:
    """Yield name, meaning, trigger and message of each automation."""
    failed = {"prefect.flow-run.Failed", "prefect.flow-run.Crashed"}
    yield (
        "grpo-run-failed",
        "failed or crashed run of the pipeline",
        EventTrigger(expect=failed, match_related=OF_PIPELINE, **AT_ONCE),
        FAILED,
    )
    yield (
        "grpo-run-completed",
        "completed run of the pipeline, with its result",
        EventTrigger(expect={"grpo.run.completed"}, **AT_ONCE),
        FROM_EVENT,
    )
    yield (
        "grpo-promoted",
        "promotion, question for approval and rollback of a registered model",
        EventTrigger(expect={*NEW_CHAMPION, "grpo.waiting-for-approval"}, **AT_ONCE),
        FROM_EVENT,
    )
    yield (
        "grpo-champion-old",
        f"champion that no other one has followed within {age}",
        EventTrigger(after=NEW_CHAMPION, expect=NEW_CHAMPION, within=age, **MISSING),
        OLD,
    )
    if forecast:
        running = {"prefect.flow-run.Running"}
        yield (
            "grpo-run-overdue",
            f"run of the pipeline without a result after twice its forecast of {forecast}",
            EventTrigger(after=running, expect=ENDED, match_related=OF_PIPELINE, within=2 * forecast, **MISSING),
            OVERDUE,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Have failures and promotions POSTed to a chat service by Prefect.")
    parser.add_argument("url", help="where to, such as https://chat.internal/hooks/abc")
    parser.add_argument("--days", type=float, default=30, help="age at which a champion is reported")
    parser.add_argument("--hours", type=float, help="forecast of your runs (`grpo plan`); twice that is overdue")
    given = parser.parse_args()
    notify(given.url, timedelta(days=given.days), timedelta(hours=given.hours) if given.hours else None)
