"""`grpo promote` and `grpo rollback`: the champion of a registered model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer
from pydantic import ValidationError

from flows.cli.terminal import option, refusals, refuse, say, set_option
from flows.serving.environment import TAG, configure
from flows.serving.find_server import use_running_server
from grpo_core.config.evaluation import RegistryConfig
from grpo_core.config.files import read_overrides
from grpo_core.errors import GrpoError
from tasks.stages.run_directory import run_folder
from tasks.stages.table import REGISTER

if TYPE_CHECKING:
    from tasks.registry.approval import Approval

RegisteredModel = Annotated[str, typer.Argument(help="name of a registered model, or of a run that registered one")]


def promote(
    model: RegisteredModel,
    version: Annotated[
        str | None,
        option(f"its number or an alias; default: the alias {RegistryConfig().alias}; for a run, its version"),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="promote whatever the gate decides; the version's tags keep its decision")
    ] = False,
    overrides: Annotated[list[str] | None, set_option("a rule, such as promotion.confidence=0.9")] = None,
    approve: Annotated[
        str | None, typer.Option(metavar="NAME", help="approve in this person's name (promotion.approval)")
    ] = None,
    reject: Annotated[str | None, typer.Option(metavar="NAME", help="reject in this person's name")] = None,
    words: Annotated[str, typer.Option(help="reason of the answer, kept in the version's tags")] = "",
) -> None:
    """Make a version the champion if it is better than the present champion.

    Exit status 1: refused, rejected or waiting for approval, 2: cannot be tried.
    """
    if approve is not None and reject is not None:
        refuse("--approve and --reject: give one of them")
    configure()
    model, registered = _find_model(model)
    version = version or registered or RegistryConfig().alias
    from tasks.registry import champion
    from tasks.registry.approval import REJECTED, WAITING
    from tasks.tracking.runs import answering

    champion.check(model, version)  # before Prefect is imported, which takes seconds
    with refusals(model):
        changes, approval = read_overrides(overrides), _read_approval(approve, reject, words)
        if use_running_server():
            from prefect import tags

            from flows import promotion
            from flows.serving.server_setup import prefect_answering

            with prefect_answering(), tags(TAG):
                # Prefect answers with the result of the state that the flow returns.
                outcome = cast(champion.Outcome, promotion.promote(model, version, force, changes, approval))
        else:
            with answering():
                outcome = champion.promote(model, version, force, changes, approval)
    text = f"{model} version {outcome.version}: {outcome.decision}: {outcome.reason}"
    if outcome.decision == WAITING:
        text += f". `grpo promote {model} --version {outcome.version} --approve NAME`, or --reject NAME, answers"
    if outcome.decision in (WAITING, REJECTED, "refused"):
        refuse(text, exit_status=1)
    say(text)


def rollback(model: RegisteredModel) -> None:
    """Make the previous champion of a registered model champion again. Exit status 2: there is none."""
    configure()
    model, _ = _find_model(model)
    from tasks.registry import champion
    from tasks.tracking.runs import answering

    if use_running_server():
        from prefect import tags

        from flows import promotion
        from flows.serving.server_setup import prefect_answering

        with prefect_answering(), tags(TAG):
            text = cast(str, promotion.rollback(model))
    else:
        with answering():
            text = champion.describe_rollback(model, *champion.rollback(model))
    say(text)


def _read_approval(approve: str | None, reject: str | None, words: str) -> Approval | None:
    from tasks.registry.approval import Approval

    name = reject if approve is None else approve
    if name is None:
        if words:
            raise GrpoError("--words: they go with --approve NAME or --reject NAME")
        return None
    try:
        return Approval(approved=approve is not None, by=name, words=words)
    except ValidationError as error:
        raise GrpoError(f"--approve, --reject or --words: {error.errors()[0]['msg']}") from None


def _find_model(name: str) -> tuple[str, str | None]:
    """Return the registered model of this name; otherwise the model and version that the run of this name
    registered."""
    from tasks.registry.champion import PromotionError, check

    try:
        check(name)
    except PromotionError as error:
        if registered := REGISTER.read_receipt(run_folder(name)):
            return registered["model_name"], registered["version"]
        refuse(f"{error}, and no run of this name has registered one; `grpo run CONFIG` does")
    return name, None
