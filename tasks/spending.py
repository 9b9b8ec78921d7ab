"""How many promotions have been tried against the same champion: each one is a further chance to be lucky."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion

TAG = "promotion.attempt"


def attempt_number(client: MlflowClient, candidate: ModelVersion, against: str, changes: Mapping[str, Any]) -> int:
    """Which attempt against a champion (its version, or "base") a comparison of this version is, from 1 on.

    Counted over all versions of the model by their tags, whenever they were compared: a champion that returns by a
    rollback goes on with its count. A version that has been compared with this champion under the same `changes` keeps
    its number, since the same comparison gives the same answer.
    """
    versions = client.search_model_versions(f"name = {candidate.name!r}")
    tried = [it for it in versions if it.tags.get("promotion.against") == against and TAG in it.tags]
    for version in tried:
        if version.version == candidate.version and json.loads(version.tags.get("promotion.changes", "{}")) == changes:
            return int(version.tags[TAG])
    return 1 + max((int(it.tags[TAG]) for it in tried), default=0)
