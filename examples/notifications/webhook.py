"""`python examples/notifications/webhook.py URL`: runs of the pipeline that complete or fail, promotions, rollbacks and
versions that wait for approval are POSTed to URL by Prefect.

Makes, or makes again, what can be edited in Prefect's UI: the block that holds the URL, and three automations.
`{"text": …}` is what chat services take. The events and their payloads: docs/reference/events.md.
"""

from __future__ import annotations

import argparse
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
BLOCK = "grpo-notifications"
FAILED = """\
{% set text = flow.name ~ ": run " ~ flow_run.name ~ " is " ~ flow_run.state.name ~ ". " ~ flow_run|ui_url %}\
{"text": {{ text | tojson }}}"""
FROM_EVENT = """{"text": {{ event.payload.text | tojson }}}"""


def notify(url: str) -> None:
    """Have runs of the pipeline that end, promotions and rollbacks POSTed to `url`."""
    block = cast(UUID, Webhook(method="POST", url=url).save(BLOCK, overwrite=True))
    failed = EventTrigger(
        expect={"prefect.flow-run.Failed", "prefect.flow-run.Crashed"},
        match_related={"prefect.resource.role": "flow", "prefect.resource.name": "pipeline"},
        **AT_ONCE,
    )
    completed = EventTrigger(expect={"grpo.run.completed"}, **AT_ONCE)
    promoted = EventTrigger(expect={"grpo.promoted", "grpo.rolled-back", "grpo.waiting-for-approval"}, **AT_ONCE)
    for name, what, trigger, message in [
        ("grpo-run-failed", "failed or crashed run of the pipeline", failed, FAILED),
        ("grpo-run-completed", "completed run of the pipeline, with its result", completed, FROM_EVENT),
        ("grpo-promoted", "promotion, question for approval and rollback of a registered model", promoted, FROM_EVENT),
    ]:
        with suppress(ObjectNotFound, ValueError):  # none yet
            cast(Automation, Automation.read(name=name)).delete()  # a coroutine only where an event loop runs
        Automation(
            name=name,
            description=f"POSTs each {what} to the webhook block {BLOCK}.",
            trigger=trigger,
            actions=[CallWebhook(block_document_id=block, payload=message)],
        ).create()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Have failures and promotions POSTed to a chat service by Prefect.")
    parser.add_argument("url", help="where to, such as https://chat.internal/hooks/abc")
    notify(parser.parse_args().url)
