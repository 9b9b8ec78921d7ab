"""The champion of a registered model: the version that the alias `champion` names, whoever set it there.

Promotion and rollback move the alias, which is one write of the registry's. What was decided stands in tags of the
version. The champions in their order are a tag of the registered model: it lives and is saved with the alias, whichever
machine moves that, and the UI shows it.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypeVar

import polars as pl
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion, RegisteredModel
from mlflow.exceptions import MlflowException

from grpo_core.config import ConfigError, parse_config
from grpo_core.evaluation_sections import RegistryConfig
from tasks import spending
from tasks.gate import Contestant, Verdict, decide
from tasks.storage import model_lock
from tasks.tracking import connect

CHAMPION = "champion"
CANDIDATE = RegistryConfig().alias
HISTORY = "champion.history"
HISTORY_LENGTH = 500  # a tag holds 100,000 characters
ROLLED_BACK = "rolled back"
NAMES_SHOWN = 5
NOT_THERE = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # the latter of a name that nothing can have
T = TypeVar("T")
ARTIFACTS = ("config.toml", "evaluation/report.json", "evaluation/samples.parquet")


class PromotionError(RuntimeError):
    """A promotion or rollback that cannot be tried; the message says why and what to do."""


@dataclass(frozen=True)
class Outcome:
    """What became of a promotion. `against`: the champion's version, or "base" where there was none. `verdict`: the
    gate's, None where the version is the champion already."""

    decision: Literal["promoted", "refused", "forced", "unchanged"]
    model: str
    version: str
    against: str
    reason: str
    verdict: Verdict | None = None


@dataclass(frozen=True)
class _Recorded:
    """What the MLflow run of a version says of its evaluation."""

    config: dict[str, Any]
    report: dict[str, Any]
    samples: pl.DataFrame


class _NotComparableError(LookupError):
    """There is nothing to judge a version by; a forced promotion does without."""


def promote(
    name: str, version: str = CANDIDATE, force: bool = False, changes: Mapping[str, Any] | None = None
) -> Outcome:
    """Make a version the champion if it passes the gate, or by `force`; either way its tags `promotion.…` say so.

    version: its number or an alias. changes: `{"promotion": {…}}`, keys that differ from the configuration recorded in
    the version's MLflow run. Promotions of a model that come at once take turns, on all machines that share the storage
    root, and each meets the champion that the one before it left. PromotionError for a model or a version that does not
    exist, ConfigError for wrong changes.
    """
    client, rules = connect(), _rules(changes or {})
    with model_lock(_model(client, name).name):
        model = _model(client, name)
        candidate = _version(client, model, version)
        number, (champion, history) = str(candidate.version), _see_champion(client, model)
        if number == champion:
            return Outcome("unchanged", name, number, number, f"version {number} is the champion already")
        attempt = spending.attempt_number(client, candidate, champion or "base", rules)
        try:
            verdict = _judge(client, candidate, champion, rules, attempt)
        except _NotComparableError as error:
            verdict = Verdict(False, str(error))
        decision = "promoted" if verdict.accepted else "forced" if force else "refused"
        if decision != "refused":
            _crown(client, name, number, decision, history)
        outcome = Outcome(decision, name, number, champion or "base", verdict.reason, verdict)
        _tag(client, candidate, _tags(outcome, rules, attempt))
        return outcome


def check(name: str, version: str | None = None) -> None:
    """PromotionError when MLflow has no such registered model, or that has no such version."""
    client = connect()
    model = _model(client, name)
    if version is not None:
        _version(client, model, version)


def rollback(name: str) -> tuple[str | None, str]:
    """Make the champion before the present one champion again; (version left, None if the alias was gone, version
    returned to). PromotionError when there was none before."""
    client = connect()
    with model_lock(_model(client, name).name):
        model = _model(client, name)
        present, history = _see_champion(client, model)
        earlier = [version for version in reversed(_reigns(history)) if version != present]
        # One may have been deleted since.
        previous = next((it for it in earlier if _if_there(lambda it=it: client.get_model_version(name, it))), None)
        if previous is None:
            left = f"version {present}" if present else "now"
            raise PromotionError(
                f"{name} has had no champion before {left} that still exists: promote another version, or delete the "
                f"alias {CHAMPION!r} in MLflow to have none"
            )
        _crown(client, name, previous, ROLLED_BACK, history)
        if present:
            tags = {"promotion.rolled_back_at": _now(), "promotion.rolled_back_to": previous}
            _tag(client, client.get_model_version(name, present), tags)
        return present, previous


def present_champion(client: MlflowClient, name: str) -> ModelVersion | None:
    """The version of a registered model that has the alias `champion`, whoever set it; None where there is none.
    MlflowException when the registry does not answer: that is not to be taken for none."""
    model = _if_there(lambda: client.get_registered_model(name))
    number = model and model.aliases.get(CHAMPION)
    return client.get_model_version(name, number) if number else None


def is_decided(name: str, version: str) -> bool:
    """Whether a promotion of the version has been tried."""
    return "promotion.decision" in connect().get_model_version(name, version).tags


def _rules(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of [promotion] that change; null stands for "as recorded"."""
    if others := sorted(changes.keys() - {"promotion"}):
        raise ConfigError(
            f"changes of {', '.join(others)}: the version was trained and evaluated by its recorded configuration; "
            "only keys of promotion can differ here, such as promotion.confidence=0.9"
        )
    return {key: value for key, value in (changes.get("promotion") or {}).items() if value is not None}


def _model(client: MlflowClient, name: str) -> RegisteredModel:
    if model := _if_there(lambda: client.get_registered_model(name)):
        return model
    names = [model.name for model in client.search_registered_models()]
    near = difflib.get_close_matches(name, names, n=NAMES_SHOWN) or sorted(names)[:NAMES_SHOWN]
    there = f"the nearest there: {', '.join(near)}" if near else "there is none there yet; `grpo run CONFIG` makes one"
    raise PromotionError(f"no registered model {name!r} in MLflow; {there}")


def _version(client: MlflowClient, model: RegisteredModel, version: str) -> ModelVersion:
    number = version if version.isdecimal() else model.aliases.get(version)
    if number is None:
        aliases = ", ".join(sorted(model.aliases)) or "none"
        raise PromotionError(
            f"{model.name} has no version with the alias {version!r} (its aliases: {aliases}): give a version's number"
        )
    found = _if_there(lambda: client.get_model_version(model.name, str(number)))
    if found is None:
        raise PromotionError(f"{model.name} has no version {number}")
    return found


def _if_there(ask: Callable[[], T]) -> T | None:
    """What the registry answers; None where it says that there is no such thing. Any other error goes on."""
    try:
        return ask()
    except MlflowException as error:
        if error.error_code not in NOT_THERE:
            raise
        return None


def _see_champion(client: MlflowClient, model: RegisteredModel) -> tuple[str | None, list[dict[str, Any]]]:
    """The champion's version and the history, which has it now where somebody else made it champion, or none."""
    champion, history = model.aliases.get(CHAMPION), json.loads(model.tags.get(HISTORY, "[]"))
    champion = None if champion is None else str(champion)
    if champion != (history[-1]["version"] if history else None):
        history = _remember(client, model.name, champion, "by hand", history)
    return champion, history


def _crown(client: MlflowClient, name: str, version: str, how: str, history: list[dict[str, Any]]) -> None:
    # The alias first: who dies between the two leaves a champion that is taken for one made by hand, not a past
    # champion that never was.
    client.set_registered_model_alias(name, CHAMPION, version)
    _remember(client, name, version, how, history)


def _remember(
    client: MlflowClient, name: str, version: str | None, how: str, history: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    longer = [*history, {"version": version, "how": how, "at": _now()}][-HISTORY_LENGTH:]
    client.set_registered_model_tag(name, HISTORY, json.dumps(longer))
    return longer


def _reigns(history: list[dict[str, Any]]) -> list[str]:
    """The champions that rollbacks lead back through, the latest last: a rollback takes back what came after."""
    reigns: list[str] = []
    for entry in history:
        version = entry["version"]
        if entry["how"] == ROLLED_BACK and version in reigns:
            while reigns[-1] != version:
                reigns.pop()
        elif version is not None:
            reigns.append(version)
    return reigns


def _judge(
    client: MlflowClient, candidate: ModelVersion, champion: str | None, rules: Mapping[str, Any], attempt: int
) -> Verdict:
    recorded = _recorded(client, candidate)
    try:
        config = parse_config(recorded.config)
    except ConfigError as error:
        raise _NotComparableError(f"the configuration recorded with it is not valid here: {error}") from None
    config = parse_config({**recorded.config, "promotion": {**recorded.config.get("promotion", {}), **rules}})
    trained = Contestant(f"version {candidate.version}", recorded.samples, "trained")
    try:
        return decide(config, trained, _rival(client, candidate, recorded, champion), attempt)
    except ValueError as error:
        raise _NotComparableError(f"{error}; a guard can be on what the evaluation recorded") from None


def _rival(client: MlflowClient, candidate: ModelVersion, recorded: _Recorded, champion: str | None) -> Contestant:
    """What the candidate has to beat. Evaluated beside it on the same prompts, or else by itself on the same prompts by
    the same settings, which is what the reports' keys tell."""
    if champion is None:
        return Contestant("the base model", recorded.samples, "base")
    label, beside = f"champion version {champion}", recorded.report.get("champion")
    if beside == {"model_name": candidate.name, "version": champion}:
        return Contestant(label, recorded.samples, CHAMPION)
    theirs = _recorded(client, client.get_model_version(candidate.name, champion))
    if theirs.report["key"] != recorded.report["key"]:
        run = recorded.config["name"]
        raise _NotComparableError(
            f"it was not evaluated beside the {label}, and on other prompts or by other settings than that was: "
            f"`grpo stage evaluate --run {run} --force` and `grpo stage register --run {run}` make a version that was"
        )
    return Contestant(label, theirs.samples, "trained")


def _recorded(client: MlflowClient, version: ModelVersion) -> _Recorded:
    missing = [path for path in ARTIFACTS if not _has_artifact(client, version.run_id, path)]
    if missing:
        raise _NotComparableError(
            f"version {version.version} has no {', '.join(missing)} in its MLflow run ({version.run_id or 'none'}), so "
            "there is nothing to judge it by; `grpo stage register --run NAME` makes versions that have"
        )
    with TemporaryDirectory() as folder:
        config, report, samples = (Path(client.download_artifacts(version.run_id, it, folder)) for it in ARTIFACTS)
        recorded = _Recorded(
            tomllib.loads(config.read_text()), json.loads(report.read_text()), pl.read_parquet(samples)
        )
    if "key" not in recorded.report:
        raise _NotComparableError(f"version {version.version} was evaluated by an older grpo-flows; evaluate it again")
    return recorded


def _has_artifact(client: MlflowClient, run_id: str | None, path: str) -> bool:
    if not run_id:
        return False
    folder = str(Path(path).parent) if "/" in path else None
    there = _if_there(lambda: client.list_artifacts(run_id, folder))  # None: the run is gone
    return path in (it.path for it in there or [])


def _tags(outcome: Outcome, rules: Mapping[str, Any], attempt: int) -> dict[str, str | None]:
    gain = outcome.verdict.comparisons[0] if outcome.verdict and outcome.verdict.comparisons else None
    return {
        "promotion.decision": outcome.decision,
        "promotion.reason": outcome.reason,
        "promotion.against": outcome.against,
        spending.TAG: str(attempt) if gain else None,
        "promotion.at": _now(),
        "promotion.metric": f"{gain.set}/{gain.metric}" if gain else None,
        "promotion.gain": f"{gain.difference.mean:.6g}" if gain else None,
        "promotion.p_value": f"{gain.difference.p_value:.6g}" if gain else None,
        "promotion.changes": json.dumps(rules) if rules else None,
        "promotion.rolled_back_at": None,
        "promotion.rolled_back_to": None,
    }


def _tag(client: MlflowClient, version: ModelVersion, tags: Mapping[str, str | None]) -> None:
    """Set tags; delete those that are None."""
    for key, value in tags.items():
        if value is not None:
            client.set_model_version_tag(version.name, str(version.version), key, value)
        elif key in version.tags:
            client.delete_model_version_tag(version.name, str(version.version), key)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
