"""`python examples/notifications/webhook.py URL`: a run of the pipeline that fails is POSTed to URL by Prefect.

Makes, or makes anew, two things on the server that can be edited in Prefect's UI: the block that holds the URL, and the
automation. `{"text": …}` is what chat services take.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from datetime import timedelta

from prefect.automations import Automation
from prefect.blocks.webhook import Webhook
from prefect.events.actions import CallWebhook
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.exceptions import ObjectNotFound

NAME = "grpo-run-failed"
MESSAGE = """\
{"text": "{{ flow.name }}: run {{ flow_run.name }} is {{ flow_run.state.name }}. {{ flow_run|ui_url }}"}"""


def notify(url: str) -> None:
    """Have failed and crashed runs of the pipeline POSTed to `url`."""
    block = Webhook(method="POST", url=url).save(NAME, overwrite=True)
    with suppress(ObjectNotFound, ValueError):  # none yet
        Automation.read(name=NAME).delete()
    Automation(
        name=NAME,
        description="POSTs each failed or crashed run of the pipeline to the webhook block of the same name.",
        trigger=EventTrigger(
            expect={"prefect.flow-run.Failed", "prefect.flow-run.Crashed"},
            match_related={"prefect.resource.role": "flow", "prefect.resource.name": "pipeline"},
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[CallWebhook(block_document_id=block, payload=MESSAGE)],
    ).create()


if __name__ == "__main__":
    notify(sys.argv[1])
