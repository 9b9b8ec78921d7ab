"""The champion of a registered model: the version that the alias `champion` names, however it was set.

Promotion and rollback move the alias, which is one write in the registry. Tags of the version record the decision. Tags
of the registered model list the champions in order, and the number of attempts against each: they are stored with the
alias, and the UI shows them.

The writes are not one transaction. If the process dies in between, their order lets the next promotion or rollback
finish the work: first the attempt (ATTEMPTS), then the decision (DECISION, or ROLLED_BACK_TO), then the alias, then the
history, and last the time (DECIDED_AT, or ROLLED_BACK_AT).
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion, RegisteredModel

from grpo_core.config.evaluation import CHAMPION, RegistryConfig
from grpo_core.errors import ConfigError, GrpoError
from tasks.registry.approval import WAITING, Approval, Change, decision_of, tags_of
from tasks.registry.gate import NotComparableError, Verdict
from tasks.registry.history import ROLLED_BACK, Entry, bounded, reigns, written
from tasks.registry.judging import RECORD, config_of, evaluated_before, judge, read_recorded
from tasks.registry.lookup import find_version, if_there
from tasks.registry.spending import ATTEMPTS, take_number
from tasks.stages.run_directory import storage_root
from tasks.tracking.runs import answering, connect

CANDIDATE = RegistryConfig().alias
HISTORY = "champion.history"
DECISION, AGAINST, REASON, DECIDED_AT = (f"promotion.{it}" for it in ("decision", "against", "reason", "at"))
ROLLED_BACK_TO, ROLLED_BACK_AT = "promotion.rolled_back_to", "promotion.rolled_back_at"
REMOVED = "removed"  # when `grpo clean` removed the version's weights
BY_HAND = "by hand"  # how a version became champion, if its alias was set in MLflow
MADE_CHAMPION = ("promoted", "forced")
NAMES_SHOWN = 5


class PromotionError(GrpoError):
    """Raised if a promotion or rollback cannot be tried; the message says why and what to do."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a promotion. `against`: the champion's version, or "base" if there was none. `verdict`: the gate's;
    None if the version is the champion already. `changes`: prompts shown to the person whose answer it waits for."""

    decision: str  # promoted, refused, forced, waiting, rejected or unchanged
    model: str
    version: str
    against: str
    reason: str
    verdict: Verdict | None = None
    changes: tuple[Change, ...] = ()


@contextmanager
def model_lock(name: str) -> Iterator[None]:
    """Wait for the lock of a registered model and hold it: across all machines that share the storage, one process at a
    time moves its aliases. The work under it takes seconds."""
    folder = storage_root() / "models"
    folder.mkdir(parents=True, exist_ok=True)
    # A model's name may be too long for a file name.
    with (folder / f"{name[:40]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def promote(
    name: str,
    version: str = CANDIDATE,
    force: bool = False,
    changes: Mapping[str, Any] | None = None,
    approval: Approval | None = None,
) -> Outcome:
    """Make a version the champion if it passes the gate, or if `force` is set; its tags `promotion.…` record which.

    version: its number or an alias. changes: `{"promotion": {…}}`, keys that differ from the configuration recorded
    with the version. approval: a person's answer. If `promotion.approval` is set and there is no answer, a version that
    passes is not promoted yet: call this again with the answer. Concurrent promotions of a model take turns, on all
    machines that share the storage root; each is compared with the champion that the previous one left. If the process
    of an earlier promotion died, that promotion is finished. Raises PromotionError if the model or the version does not
    exist, or if another machine changed the champion meanwhile; ConfigError for wrong changes.
    """
    client, rules = connect(), _rules(changes or {})
    with model_lock(_model(client, name).name):
        model = _model(client, name)
        candidate = _version(client, model, version)
        number, (champion, history) = str(candidate.version), _see_champion(client, model)
        if number == champion:
            if not _is_being_promoted(candidate):
                return Outcome("unchanged", name, number, number, f"version {number} is the champion already")
            begun = candidate.tags
            _tag(client, candidate, {DECIDED_AT: _now()})
            return Outcome(begun[DECISION], name, number, begun[AGAINST], begun[REASON])
        returning = {"base", *(entry["version"] for entry in reigns(history))}
        attempt = 0
        try:
            recorded = read_recorded(client, candidate)
            config = config_of(recorded, rules)
            since = _since(champion, history)
            before = evaluated_before(client, candidate, recorded, config.promotion.set, champion, since)
            attempt, attempts = take_number(
                model.tags.get(ATTEMPTS, ""),
                champion or "base",
                _comparison(candidate, rules),
                returning,
                [_comparison(it, {}) for it in before],
            )
            verdict, shown = judge(client, candidate, champion, recorded, config, attempt, len(before))
        except NotComparableError as error:
            verdict, shown = Verdict(False, str(error)), None
        else:
            client.set_registered_model_tag(name, ATTEMPTS, attempts)
        decision = decision_of(verdict.accepted, shown is not None, force, approval)
        reason = verdict.reason + _why_no_champion(client, name, history)
        outcome = Outcome(decision, name, number, champion or "base", reason, verdict, shown or ())
        tags = {**_tags(outcome, rules, attempt), **tags_of(approval)}
        _tag(client, candidate, {DECIDED_AT: None, DECISION: None, **tags})
        if decision not in MADE_CHAMPION:
            _tag(client, candidate, {DECISION: decision})
            if decision == WAITING:
                return outcome
        else:
            _refuse_another_champion(client, name, champion)
            _tag(client, candidate, {DECISION: decision})
            _crown(client, name, number, decision, history)
        _tag(client, candidate, {DECIDED_AT: _now()})
        return outcome


def check(name: str, version: str | None = None) -> None:
    """Raises PromotionError if MLflow has no such registered model, or if the model has no such version."""
    with answering():
        client = connect()
        model = _model(client, name)
        if version is not None:
            _version(client, model, version)


def rollback(name: str) -> tuple[str | None, str]:
    """Make the previous champion champion again. Returns the version left (None if the alias was gone) and the version
    returned to. If the process of an earlier rollback died, finish that one instead. Raises PromotionError if there was
    no champion before, or if another machine changed the champion meanwhile."""
    client = connect()
    with model_lock(_model(client, name).name):
        model = _model(client, name)
        present, history = _see_champion(client, model)
        if left := _being_rolled_back(client, name, present, history):
            _tag(client, left, {ROLLED_BACK_AT: _now()})
            return str(left.version), history[-1]["version"]
        previous = _previous(client, name, present, history)
        if previous is None:
            before = f"version {present}" if present else "now"
            raise PromotionError(
                f"{name} has no champion before {before} that still exists: promote another version, or delete the "
                f"alias {CHAMPION!r} in MLflow to have none"
            )
        leaving = client.get_model_version(name, present) if present else None
        _refuse_another_champion(client, name, present)
        if leaving:
            # An interrupted promotion of this version ends here too: otherwise a pipeline would try it again.
            ended = {DECIDED_AT: _now()} if _is_being_promoted(leaving) else {}
            _tag(client, leaving, {**ended, ROLLED_BACK_AT: None, ROLLED_BACK_TO: previous})
        _crown(client, name, previous, ROLLED_BACK, history)
        if leaving:
            _tag(client, leaving, {ROLLED_BACK_AT: _now()})
        return present, previous


def why_needed(client: MlflowClient, version: ModelVersion) -> str:
    """Why the weights of a version are still needed; "" if they are not."""
    name, number, model = version.name, str(version.version), client.get_registered_model(version.name)
    if aliases := sorted(alias for alias, other in model.aliases.items() if str(other) == number):
        return f"{name} version {number} has the alias {aliases[0]}"
    history = json.loads(model.tags.get(HISTORY, "[]"))
    if number == _previous(client, name, model.aliases.get(CHAMPION), history):
        return f"a rollback of {name} returns to version {number}"
    if version.tags.get(DECISION) == WAITING:
        return f"{name} version {number} waits for approval"
    return f"{name} version {number} is being promoted" if _is_being_promoted(version) else ""


def describe_rollback(name: str, left: str | None, version: str) -> str:
    return f"{name} version {version} is champion again" + (f", version {left} is not" if left else "")


def present_champion(client: MlflowClient, name: str) -> ModelVersion | None:
    """Return the version of a registered model that has the alias `champion`; None if there is none. Raises
    MlflowException if the registry does not answer, since that does not mean that there is none."""
    model = if_there(lambda: client.get_registered_model(name))
    number = model.aliases.get(CHAMPION) if model else None
    return client.get_model_version(name, number) if number else None


def is_decided(name: str, version: str) -> bool:
    """True if a promotion of the version has been tried and has ended."""
    with answering():
        return DECIDED_AT in connect().get_model_version(name, version).tags


def _rules(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of [promotion] that change; null means "as recorded"."""
    if others := sorted(changes.keys() - {"promotion"}):
        raise ConfigError(
            f"changes of {', '.join(others)}: the version was trained and evaluated by its recorded configuration; "
            "only keys of promotion can differ here, such as promotion.confidence=0.9"
        )
    return {key: value for key, value in (changes.get("promotion") or {}).items() if value is not None}


def _model(client: MlflowClient, name: str) -> RegisteredModel:
    if model := if_there(lambda: client.get_registered_model(name)):
        return model
    names = [model.name for model in client.search_registered_models()]
    near = difflib.get_close_matches(name, names, n=NAMES_SHOWN) or sorted(names)[:NAMES_SHOWN]
    there = f"the nearest there: {', '.join(near)}" if near else "there is none yet"
    raise PromotionError(f"no registered model {name!r} in MLflow; {there}")


def _version(client: MlflowClient, model: RegisteredModel, version: str) -> ModelVersion:
    number = version if version.isdecimal() else model.aliases.get(version)
    if number is None:
        aliases = ", ".join(sorted(model.aliases)) or "none"
        raise PromotionError(
            f"{model.name} has no version with the alias {version!r} (its aliases: {aliases}): give a version's number"
        )
    found = find_version(client, model.name, str(number))
    if found is None:
        raise PromotionError(f"{model.name} has no version {number}")
    if REMOVED in found.tags:
        raise PromotionError(
            f"{model.name} version {number} has no weights any more: `grpo clean` removed them on "
            f"{found.tags[REMOVED]}; train again, or promote another version"
        )
    return found


def _see_champion(client: MlflowClient, model: RegisteredModel) -> tuple[str | None, list[Entry]]:
    """Return the champion's version, None if there is none, and the history. If the history does not end with that
    champion, the alias was moved by hand, or by a process that died before it wrote the entry: add the entry."""
    champion, history = model.aliases.get(CHAMPION), json.loads(model.tags.get(HISTORY, "[]"))
    champion = None if champion is None else str(champion)
    if champion != (history[-1]["version"] if history else None):
        if _being_rolled_back(client, model.name, champion, history):
            how = ROLLED_BACK
        elif champion and _is_being_promoted(version := client.get_model_version(model.name, champion)):
            how = version.tags[DECISION]
        else:
            how = BY_HAND
        history = _remember(client, model.name, champion, how, history)
    return champion, history


def _since(champion: str | None, history: list[Entry]) -> float:
    """Time from which on the version has been champion, in ms since 1970; 0 for None. If the alias was moved by hand,
    that of the entry before, since the time of the move is not recorded."""
    place = next((n for n, entry in enumerate(history) if champion and entry["version"] == champion), 0)
    place -= bool(history) and history[place]["how"] == BY_HAND
    if not champion or place < 0:
        return 0.0
    return 1000 * datetime.fromisoformat(history[place]["at"]).timestamp()


def _previous(client: MlflowClient, name: str, present: str | None, history: list[Entry]) -> str | None:
    """Version to which a rollback returns: the latest champion before the `present` one that still has its weights;
    None if there is none."""
    for entry in reversed(reigns(history)):
        version = find_version(client, name, entry["version"]) if entry["version"] != str(present) else None
        if version and REMOVED not in version.tags:
            return entry["version"]
    return None


def _comparison(version: ModelVersion, rules: Mapping[str, Any]) -> list[Any]:
    """Identify a comparison of the version with its rival: what was recorded with it, and the rules."""
    return [version.run_id, version.tags.get(RECORD), rules]


def _is_being_promoted(version: ModelVersion) -> bool:
    """True if a promotion of this version was decided but not completely written, because the process died."""
    return version.tags.get(DECISION) in MADE_CHAMPION and DECIDED_AT not in version.tags


def _being_rolled_back(
    client: MlflowClient, name: str, champion: str | None, history: list[Entry]
) -> ModelVersion | None:
    """Version left by a rollback to `champion` whose process died before everything was written; None if there is
    none."""
    number = next((entry["version"] for entry in reversed(history) if entry["version"] != champion), None)
    left = find_version(client, name, number) if number else None
    if left and champion and left.tags.get(ROLLED_BACK_TO) == champion and ROLLED_BACK_AT not in left.tags:
        return left
    return None


def _why_no_champion(client: MlflowClient, name: str, history: list[Entry]) -> str:
    """End of a sentence, if the model had a champion but has none now: what became of it; else ""."""
    last = next((entry["version"] for entry in reversed(history) if entry["version"]), None)
    if last is None or history[-1]["version"]:
        return ""
    fate = "lost the alias" if find_version(client, name, last) else "was deleted"
    return f"; there is no champion: version {last}, the last one, {fate}"


def _refuse_another_champion(client: MlflowClient, name: str, seen: str | None) -> None:
    """Raises PromotionError if the champion is no longer the one `seen`: machines that share no storage root do not
    wait for each other's lock."""
    now = client.get_registered_model(name).aliases.get(CHAMPION)
    if (now and str(now)) != seen:
        raise PromotionError(
            f"the champion of {name} was {_called(seen)} at the start and is {_called(now)} now: another machine or "
            "person has changed it meanwhile. Nothing was changed here; start again"
        )


def _called(champion: str | None) -> str:
    return f"version {champion}" if champion else "none"


def _crown(client: MlflowClient, name: str, version: str, how: str, history: list[Entry]) -> None:
    # Set the alias first: if the process dies in between, the history must not name a champion that never was one.
    client.set_registered_model_alias(name, CHAMPION, version)
    _remember(client, name, version, how, history)


def _remember(client: MlflowClient, name: str, version: str | None, how: str, history: list[Entry]) -> list[Entry]:
    longer = bounded([*history, {"version": version, "how": how, "at": _now()}])
    client.set_registered_model_tag(name, HISTORY, written(longer))
    return longer


def _tags(outcome: Outcome, rules: Mapping[str, Any], attempt: int) -> dict[str, str | None]:
    """Tags with the grounds of a decision. The decision itself is written later, once the champion is known to be
    unchanged."""
    gain = outcome.verdict.comparisons[0] if outcome.verdict and outcome.verdict.comparisons else None
    return {
        REASON: outcome.reason,
        AGAINST: outcome.against,
        "promotion.attempt": str(attempt) if gain else None,
        "promotion.metric": f"{gain.set}/{gain.metric}" if gain else None,
        "promotion.gain": f"{gain.difference.mean:.6g}" if gain else None,
        "promotion.p_value": f"{gain.difference.p_value:.6g}" if gain else None,
        "promotion.changes": json.dumps(rules) if rules else None,
        ROLLED_BACK_AT: None,
        ROLLED_BACK_TO: None,
    }


def _tag(client: MlflowClient, version: ModelVersion, tags: Mapping[str, str | None]) -> None:
    """Set tags; delete those whose value is None."""
    for key, value in tags.items():
        if value is not None:
            client.set_model_version_tag(version.name, str(version.version), key, value)
        elif key in version.tags:
            client.delete_model_version_tag(version.name, str(version.version), key)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
