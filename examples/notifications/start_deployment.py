"""`python examples/notifications/start_deployment.py FLOW/DEPLOYMENT`: each new champion starts a deployment of yours.

Makes, or makes again, an automation of Prefect. Its server starts the deployment with the parameters `model` and
`version` when a promotion emits grpo.promoted, or a rollback grpo.rolled-back, for example to serve the version.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

from prefect.automations import Automation
from prefect.client.orchestration import get_client
from prefect.events.actions import RunDeployment
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.exceptions import ObjectNotFound

NAME = "grpo-champion-starts-deployment"
NEW_CHAMPION = {"grpo.promoted", "grpo.rolled-back"}  # after either, another version is champion


def start_with_each_champion(deployment: str) -> None:
    """Start the deployment, FLOW/DEPLOYMENT, with model and version of each new champion. Raises ObjectNotFound if
    Prefect has no such deployment."""
    with get_client(sync_client=True) as client:
        known = client.read_deployment_by_name(deployment)
    with suppress(ObjectNotFound, ValueError):  # none yet
        cast(Automation, Automation.read(name=NAME)).delete()  # a coroutine only where an event loop runs
    Automation(
        name=NAME,
        description=f"Starts {deployment} with each new champion.",
        trigger=EventTrigger(expect=NEW_CHAMPION, posture=Posture.Reactive, threshold=1, within=timedelta(0)),
        actions=[
            RunDeployment(
                deployment_id=known.id,
                parameters={name: _from_event(name) for name in ("model", "version")},
            )
        ],
    ).create()


def _from_event(key: str) -> dict[str, Any]:
    """A parameter that Prefect takes from the event's payload."""
    return {"__prefect_kind": "jinja", "template": f"{{{{ event.payload.{key} }}}}"}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Have Prefect start a deployment with each new champion.")
    parser.add_argument("deployment", help="FLOW/DEPLOYMENT, which takes the parameters model and version")
    start_with_each_champion(parser.parse_args().deployment)
