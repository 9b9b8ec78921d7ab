"""Promotion of a registered model's versions, and rollback. The pipeline promotes too, if `promotion.automatic` is
set."""

from __future__ import annotations

from typing import Annotated, Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed
from pydantic import WithJsonSchema

from flows.parameters.form import form_schema
from tasks import promotion
from tasks.registry.approval import Approval
from tasks.registry.champion import CANDIDATE, Outcome
from tasks.stages.attempts import restore_lost_retry
from tasks.stages.endings import end_in_plain_words

Changes = Annotated[dict[str, Any], WithJsonSchema(form_schema("promotion"))]

# Prefect shows this on the deployment's page, as Markdown with every line a paragraph.
PROMOTE = """
Make a version of a registered model the champion, if it is better than the present champion and breaks no guard.

Run → Custom run, `model`: the model's name in MLflow. The run ends as Promoted, Refused, Rejected, Forced or \
Unchanged; its message, the artifact `promotion` and the version's tags in MLflow say why. If the rules ask for \
approval, the run is suspended first: Resume shows the verdict and asks for the answer. The rules are those of the \
configuration that the version was trained with; `changes` replaces some of them.
"""
ROLLBACK = """
Return to the champion before the present one.

Run → Custom run, `model`: the model's name in MLflow.
"""


@flow(
    name="promote",
    description=PROMOTE,
    flow_run_name="{model}-{version}-promote",
    on_crashed=[restore_lost_retry],
)
@end_in_plain_words
def promote(
    model: str,
    version: str = CANDIDATE,
    force: bool = False,
    changes: Changes = {},  # noqa: B006 (read only)
    approval: Approval | None = None,
) -> State[Outcome]:
    """Promote a version if it passes the gate.

    Args:
        model: Name of the registered model.
        version: Number of the version, or an alias of it.
        force: Promote it whatever the gate decides. The version's tags keep the gate's decision.
        changes: Rules that differ from those recorded with the version.
        approval: A person's answer, if the version's rules ask for one. If it is missing then, this run waits for it.
    """
    return promotion.outcome_as_state(promotion.promote_or_ask(model, version, force, changes, approval))


@flow(
    name="rollback",
    description=ROLLBACK,
    flow_run_name="{model}-rollback",
    on_crashed=[restore_lost_retry],
)
@end_in_plain_words
def rollback(model: str) -> State[str]:
    """Make the previous champion champion again.

    Args:
        model: Name of the registered model.
    """
    said = promotion.rollback(model).result()
    return Completed(message=said, data=said)
