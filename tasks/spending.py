"""How many promotions have been tried against the same champion: each one is a further chance to be lucky."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion


def attempt_tag(against: str) -> str:
    """Tag of a version that says which attempt against a champion (its version, or "base") it was, by which rules."""
    return f"promotion.attempt.{against}"


def attempt_text(attempt: int, changes: Mapping[str, Any]) -> str:
    """The tag's value."""
    return json.dumps({"attempt": attempt, "changes": changes})


def attempt_number(client: MlflowClient, candidate: ModelVersion, against: str, changes: Mapping[str, Any]) -> int:
    """Number of this comparison among those with the same champion (its version, or "base"), from 1.

    Counted by the tags of all versions of the model, whenever they were compared: a champion that returns by a rollback
    goes on with its count. A version that has been compared with this champion under the same `changes` keeps its
    number, since the same comparison gives the same answer.
    """
    tag, versions = attempt_tag(against), client.search_model_versions(f"name = {candidate.name!r}")
    tried = {it.version: json.loads(it.tags[tag]) for it in versions if tag in it.tags}
    own = tried.get(candidate.version)
    if own and own["changes"] == changes:
        return own["attempt"]
    return 1 + max((it["attempt"] for it in tried.values()), default=0)
