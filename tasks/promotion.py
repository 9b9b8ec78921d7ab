"""Promotion and rollback as Prefect tasks; the decision becomes an artifact, a state and an event."""

from __future__ import annotations

from typing import Any

from prefect import get_run_logger, task
from prefect.client.schemas.objects import State
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from prefect.input.actions import filter_flow_run_input
from prefect.runtime import deployment
from prefect.states import Completed

from tasks.registry import champion
from tasks.registry.approval import REJECTED, WAITING, Approval
from tasks.registry.champion import Outcome
from tasks.rendering import figures
from tasks.rendering.markdown import escape, table
from tasks.reports.events import announce
from tasks.tracking.artifacts import show_markdown
from tasks.tracking.runs import answering, version_address

EVENTS = {"promoted": "grpo.promoted", "forced": "grpo.promoted", WAITING: "grpo.waiting-for-approval"}
EVENTS |= {"refused": "grpo.refused", REJECTED: "grpo.rejected"}  # by decision; none for "unchanged"
ROLLED_BACK = "grpo.rolled-back"
QUESTION = "approve-"  # begins the key of a question; the version's number follows, since Prefect takes no other text


@task(name="promote")
def promote(
    model: str, version: str, force: bool, changes: dict[str, Any], approval: Approval | None = None
) -> State[Outcome]:
    with answering():
        outcome = champion.promote(model, version, force, changes, approval)
    get_run_logger().info("%s version %s: %s: %s", model, outcome.version, outcome.decision, outcome.reason)
    headline = f"{model} version {outcome.version}: {outcome.decision}"
    show_markdown("promotion", _markdown(headline, outcome), escape(headline))
    if event := EVENTS.get(outcome.decision):
        announce(event, "model", model, _payload(outcome, approval))
    return outcome_as_state(outcome)


def promote_or_ask(
    model: str, version: str, force: bool, changes: dict[str, Any], approval: Approval | None = None
) -> Outcome:
    """Try a promotion. If it waits for a person, suspend this flow run, unless it is of no deployment, which nothing
    could resume. Resumed in Prefect with an answer, the flow begins again, and the answer is to the version that was
    asked about, whatever `version` names now and whatever the gate says of it; to none if `version` is the number of
    another one. To be called by a flow."""
    answered = _answer() if deployment.id else None
    if answered and (not version.isdecimal() or version == answered[0]):
        version, approval = answered
    outcome = promote(model, version, force, changes, approval).result()
    if outcome.decision == WAITING and deployment.id:
        form = RunInput.subclass_from_base_model_type(Approval).with_initial_data(description=_question(outcome))
        suspend_flow_run(wait_for_input=form, timeout=None, key=QUESTION + outcome.version)
    return outcome


def _answer() -> tuple[str, Approval] | None:
    """The version that this flow run has asked about, and the answer; None if there is none."""
    prefix, end = f"suspended-{QUESTION}", "-response"  # as Prefect names what it keeps
    inputs = filter_flow_run_input(prefix, limit=10)
    assert isinstance(inputs, list)  # a coroutine only where an event loop runs
    answers = [found for found in inputs if found.key.endswith(end)]
    return next(((it.key.removesuffix(end).rpartition("-")[2], Approval(**it.decoded_value)) for it in answers), None)


def _question(outcome: Outcome) -> str:
    """Question to a person, as Markdown without tables, which Prefect's narrow dialog shrinks until they are
    unreadable."""
    asked = f"# Make {escape(outcome.model)} version {outcome.version} the champion?"
    guards = outcome.verdict.comparisons[1:] if outcome.verdict else ()
    held = (f"{it.set} {it.metric} {figures.amount(it.metric, it.candidate)}: {it.rule}" for it in guards)
    parts = [asked, escape(outcome.reason), *(escape(line) for line in held), _link(outcome)]
    lost = [it for it in outcome.changes if it.gain < 0]
    won = [it for it in outcome.changes if it.gain > 0]
    for title, some in (("What it lost most", lost), ("What it won most", won)):
        parts += [f"## {title}"] if some else []
        for it in some:
            parts += [f"**{figures.number(it.gain)}** {escape(it.prompt)}"]
            parts += [f"**was** {escape(it.rival)}", f"**is** {escape(it.candidate)}"]
    return "\n\n".join(parts) + "\n"


def _link(outcome: Outcome) -> str:
    """Link to the version in MLflow, from where its answers are a click away."""
    address = version_address(outcome.model, outcome.version)
    return f"{escape(outcome.model)} [version {outcome.version} in MLflow]({address})"


@task(name="rollback")
def rollback(model: str) -> State[str]:
    with answering():
        left, version = champion.rollback(model)
    text = champion.describe_rollback(model, left, version)
    get_run_logger().info(text)
    payload = {"model": model, "version": version, "left": left, "text": text}
    announce(ROLLED_BACK, "model", model, {**payload, "version_url": version_address(model, version)})
    return Completed(message=text, data=text)


def outcome_as_state(outcome: Outcome) -> State[Outcome]:
    """Convert the outcome to a state. A refusal is a completed state, not a failure: trying again would change
    nothing."""
    return Completed(name=outcome.decision.capitalize(), message=outcome.reason, data=outcome)


def _payload(outcome: Outcome, approval: Approval | None) -> dict[str, Any]:
    """The payload of a promotion's event."""
    model, version = outcome.model, outcome.version
    said = {
        WAITING: "waits for approval",
        "promoted": "is champion (promoted)",
        "forced": "is champion (forced)",
    }.get(outcome.decision, f"is {outcome.decision}")
    payload: dict[str, Any] = {
        "model": model,
        "version": version,
        "decision": outcome.decision,
        "against": outcome.against,
        "reason": outcome.reason,
        "text": f"{model} version {version} {said}: {outcome.reason}",
        "version_url": version_address(model, version),
        **({"by": approval.by, "words": approval.words} if approval else {}),
    }
    if outcome.verdict and outcome.verdict.comparisons:
        first = outcome.verdict.comparisons[0]
        gain = first.difference
        payload |= {"metric": first.metric, "value": first.candidate, "rival": first.rival, "gain": gain.mean}
        payload |= {"gain_low": gain.low, "gain_high": gain.high, "p_value": gain.p_value}
    return payload


def _markdown(headline: str, outcome: Outcome) -> str:
    parts = [f"# {escape(headline)}", escape(outcome.reason), _link(outcome)]
    if outcome.verdict and outcome.verdict.comparisons:
        rival = "base" if outcome.against == "base" else f"version {outcome.against}"
        confidence = outcome.verdict.comparisons[0].difference.confidence
        gained = f"gain, {100 * confidence:.3g}% interval"
        rows = [["", f"version {outcome.version}", rival, gained, "p", "rule"]]
        for it in outcome.verdict.comparisons:
            found = vars(it.difference)
            values = (figures.amount(it.metric, it.candidate), figures.amount(it.metric, it.rival))
            change = f"{figures.gain(it.metric, found)} {figures.interval(it.metric, found)}"
            p_value = figures.p_value(it.difference.p_value)
            rule = f"{'broken' if it.broken else 'kept'}: {it.rule}"
            rows.append([f"{it.set} {it.metric}", *values, change, p_value, rule])
        parts.append(table(rows))
    return "\n\n".join(parts) + "\n"
