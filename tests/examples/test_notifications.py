"""What the examples have Prefect's server send is JSON with the texts in it, whatever these contain."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from prefect.server.utilities.user_templates import register_user_template_filters, render_user_template_sync

from examples.notifications.webhook import FAILED, FROM_EVENT

HOSTILE = 'x", "channel": "#ops", "y": "\n\\ {{ 1 }} </script>'


@pytest.mark.slow
def test_a_name_or_a_text_does_not_break_out_of_a_notification() -> None:
    register_user_template_filters({"ui_url": lambda run: f"https://prefect.internal/{run.id}"})
    run = SimpleNamespace(id=1, name=HOSTILE, state=SimpleNamespace(name="Failed"))
    context = {"flow": SimpleNamespace(name="pipeline"), "flow_run": run}
    said = f"pipeline: run {HOSTILE} is Failed. https://prefect.internal/1"
    assert json.loads(render_user_template_sync(FAILED, context)) == {"text": said}
    event = SimpleNamespace(payload={"text": HOSTILE})
    assert json.loads(render_user_template_sync(FROM_EVENT, {"event": event})) == {"text": HOSTILE}
