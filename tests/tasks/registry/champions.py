"""Versions of a registered model, their tags, and which is champion."""

from __future__ import annotations

import json

import polars as pl

from tasks.registry.champion import promote
from tasks.tracking.runs import connect
from tests.evaluations import fixed_samples, register_version

NUM_PROMPTS = 40


def samples_of(**right: int) -> pl.DataFrame:
    """Each policy gets this many of the first of NUM_PROMPTS prompts right."""
    return fixed_samples({policy: [1] * n + [0] * (NUM_PROMPTS - n) for policy, n in right.items()})


def tags_of(model: str, version: str) -> dict[str, str]:
    tags = connect().get_model_version(model, version).tags
    return {key.removeprefix("promotion."): value for key, value in tags.items() if key.startswith("promotion.")}


def champion_of(model: str) -> str | None:
    version = connect().get_registered_model(model).aliases.get("champion")
    return None if version is None else str(version)


def history_of(model: str) -> list[tuple[str | None, str]]:
    history = json.loads(connect().get_registered_model(model).tags["champion.history"])
    return [(entry["version"], entry["how"]) for entry in history]


def make_champions(model: str, count: int) -> None:
    """Versions 1 to `count`, each promoted, each better than the one before."""
    for version in range(1, count + 1):
        register_version(model, samples_of(base=0, trained=8 * version))
        assert promote(model).decision == "promoted"
