"""`grpo promote` and `grpo rollback`: the champion of a registered model."""

from __future__ import annotations

from typing import Annotated, cast

import typer

from flows.cli.terminal import refusals, refuse, say
from flows.serving.environment import TAG, configure
from flows.serving.find_server import use_running_server
from grpo_core.config.evaluation import RegistryConfig
from grpo_core.config.files import read_overrides
from tasks.stages.run_directory import run_folder
from tasks.stages.table import REGISTER

RegisteredModel = Annotated[str, typer.Argument(help="name of a registered model, or of a run that registered one")]


def promote(
    model: RegisteredModel,
    version: Annotated[
        str | None, typer.Option(help="its number or an alias; default: the newest, or the run's", show_default=False)
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="whatever the gate decides; the version's tags keep its decision")
    ] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="a rule, such as promotion.confidence=0.9")
    ] = None,
) -> None:
    """Make a version the champion if it is better than the present one. Exit status 1: refused, 2: cannot be tried."""
    configure()
    model, registered = _find_model(model)
    version = version or registered or RegistryConfig().alias
    from tasks.registry import champion
    from tasks.tracking.runs import answering

    champion.check(model, version)  # before Prefect is imported, which takes seconds
    with refusals(model):
        changes = read_overrides(overrides)
        if use_running_server():
            from prefect import tags

            from flows import promotion

            with tags(TAG):
                # Prefect answers with the result of the state that the flow returns.
                outcome = cast(champion.Outcome, promotion.promote(model, version, force, changes))
        else:
            with answering():
                outcome = champion.promote(model, version, force, changes)
    text = f"{model} version {outcome.version}: {outcome.decision}: {outcome.reason}"
    if outcome.decision == "refused":
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

        with tags(TAG):
            text = promotion.rollback(model)
    else:
        with answering():
            text = champion.describe_rollback(model, *champion.rollback(model))
    say(text)


def _find_model(name: str) -> tuple[str, str | None]:
    """The registered model of this name; otherwise the model and version that the run of this name registered."""
    from tasks.registry.champion import PromotionError, check

    try:
        check(name)
    except PromotionError as error:
        if registered := REGISTER.read_receipt(run_folder(name)):
            return registered["model_name"], registered["version"]
        refuse(f"{error}, and no run of this name has registered one; `grpo run CONFIG` does")
    return name, None
