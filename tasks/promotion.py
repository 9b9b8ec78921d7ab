"""Promote and roll back as Prefect tasks; the decision becomes an artifact, a state and an event."""

from __future__ import annotations

from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from prefect.states import Completed

from tasks.registry import champion
from tasks.registry.approval import WAITING, Approval
from tasks.registry.champion import Outcome
from tasks.rendering import figures
from tasks.rendering.markdown import escape, table
from tasks.tracking.runs import answering

PROMOTED = "grpo.promoted"
ASKED = "grpo.waiting-for-approval"
ROLLED_BACK = "grpo.rolled-back"


@task(name="promote")
def promote(
    model: str, version: str, force: bool, changes: dict[str, Any], approval: Approval | None = None
) -> State[Outcome]:
    with answering():
        outcome = champion.promote(model, version, force, changes, approval)
    get_run_logger().info("%s version %s: %s: %s", model, outcome.version, outcome.decision, outcome.reason)
    headline = f"{model} version {outcome.version}: {outcome.decision}"
    create_markdown_artifact(key="promotion", markdown=_markdown(headline, outcome), description=escape(headline))
    if outcome.decision in ("promoted", "forced"):
        text = f"{model} version {outcome.version} is champion ({outcome.decision}): {outcome.reason}"
        _announce(PROMOTED, model, outcome.version, text)
    if outcome.decision == WAITING:
        _announce(
            ASKED, model, outcome.version, f"{model} version {outcome.version} waits for approval: {outcome.reason}"
        )
    return answer(outcome)


def ask(outcome: Outcome) -> Approval:
    """A person's answer: this flow run is suspended until it is resumed in Prefect with their answer, and begins again
    then. Call this from the flow that is to be suspended, of a deployment."""
    form = RunInput.subclass_from_base_model_type(Approval).with_initial_data(description=_question(outcome))
    answered = suspend_flow_run(wait_for_input=form, timeout=None, key=f"approve-{outcome.model}-{outcome.version}")
    return Approval(**answered.model_dump())


def _question(outcome: Outcome) -> str:
    heads = ["change", "prompt", "was", "is"]
    rows = [[figures.number(it.gain), it.prompt, it.rival, it.candidate] for it in outcome.changes]
    asked = f"Make {outcome.model} version {outcome.version} the champion?"
    shown = ["The samples that changed most, the worst first:", table([heads, *rows])] if rows else []
    return "\n\n".join([_markdown(asked, outcome), *shown]) + "\n"


@task(name="rollback")
def rollback(model: str) -> State[str]:
    with answering():
        left, version = champion.rollback(model)
    text = champion.describe_rollback(model, left, version)
    get_run_logger().info(text)
    _announce(ROLLED_BACK, model, version, text)
    return Completed(message=text, data=text)


def answer(outcome: Outcome) -> State[Outcome]:
    """The outcome as a state. A refusal is a completed state, not a failure: trying again would change nothing."""
    return Completed(name=outcome.decision.capitalize(), message=outcome.reason, data=outcome)


def _announce(event: str, model: str, version: str, text: str) -> None:
    """Emit an event that automations can listen for."""
    resource = {"prefect.resource.id": f"grpo.model.{model}", "prefect.resource.name": model}
    emit_event(event, resource, payload={"model": model, "version": version, "text": text})


def _markdown(headline: str, outcome: Outcome) -> str:
    parts = [f"# {escape(headline)}", escape(outcome.reason)]
    if outcome.verdict and outcome.verdict.comparisons:
        rival = "base" if outcome.against == "base" else f"version {outcome.against}"
        confidence = outcome.verdict.comparisons[0].difference.confidence
        interval = f"{100 * confidence:.3g}% interval"
        rows = [["", "rule", f"version {outcome.version}", rival, "gain", interval, "p", "held to"]]
        for it in outcome.verdict.comparisons:
            found = vars(it.difference)
            values = (figures.amount(it.metric, it.candidate), figures.amount(it.metric, it.rival))
            change = (figures.gain(it.metric, found), figures.interval(it.metric, found))
            p_value = figures.p_value(it.difference.p_value)
            rows.append(
                [f"{it.set} {it.metric}", "broken" if it.broken else "kept", *values, *change, p_value, it.rule]
            )
        parts.append(table(rows))
    return "\n\n".join(parts) + "\n"
