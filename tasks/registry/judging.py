"""Judge a version by the configuration and the evaluation that were recorded with it in MLflow."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts, list_artifacts
from mlflow.entities.model_registry import ModelVersion
from mlflow.utils.uri import append_to_uri_path

from grpo_core import run_files
from grpo_core.config.evaluation import CHAMPION, HELD_OUT
from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from grpo_core.evaluation.outcomes import distinct_prompts
from grpo_core.system.tables import read_parquet
from tasks.registry.approval import Change, largest_changes
from tasks.registry.asking import disagreement
from tasks.registry.gate import Contestant, NotComparableError, Verdict, decide, refuse_chosen_there
from tasks.registry.lookup import find_version, if_there
from tasks.tracking.view import SWEEP

# Tags of a version: the folder in its MLflow run that holds RECORDED; the sweep that chose it.
RECORD, CHOSEN = "record", "sweep.chosen"
PROMPTS = "prompts."  # the beginning of tags of a version: hash of the prompts of a set, by its name
RECORDED = (run_files.CONFIG, *(f"{run_files.EVALUATION}/{it}" for it in (run_files.REPORT, run_files.SAMPLES)))
DIGITS = 16


@dataclass(frozen=True)
class Recorded:
    """Configuration and evaluation of a version, from its MLflow run, in the folder that the tag RECORD names."""

    config: dict[str, Any]
    report: dict[str, Any]
    samples: pl.DataFrame


def config_of(recorded: Recorded, rules: Mapping[str, Any]) -> RunConfig:
    """Return the configuration, with these keys of [promotion] instead of those recorded. Raises NotComparableError if
    the one recorded is not valid."""
    try:
        config = parse_config(recorded.config)
    except ConfigError as error:
        raise NotComparableError(f"the configuration recorded with it is not valid here: {error}") from None
    if not rules:
        return config
    return parse_config({**recorded.config, "promotion": {**recorded.config.get("promotion", {}), **rules}})


def prompts_tags(samples: pl.DataFrame) -> dict[str, str]:
    """Tags of a version by which those that were evaluated on the same prompts are found, whatever else differs."""
    return {f"{PROMPTS}{name}": _hash_prompts(samples, name) for name in samples["set"].unique().sort()}


def _hash_prompts(samples: pl.DataFrame, set: str) -> str:
    return hashlib.sha256("\n".join(sorted(distinct_prompts(samples, set))).encode()).hexdigest()[:DIGITS]


def evaluated_before(
    client: MlflowClient, candidate: ModelVersion, recorded: Recorded, set: str, champion: str | None, since: float
) -> list[ModelVersion]:
    """Return the versions that were evaluated on the set's prompts before the candidate, the oldest first: the
    candidate may have been chosen by their reports.

    since: time from which on they count, in ms since 1970; a candidate from before is one of all. Of a sweep that has
    chosen an arm, only that arm counts, since the sweep does not choose on the prompts that judge it
    (`refuse_chosen_there`); all its arms count if the candidate is another one.
    """
    since = since if candidate.creation_timestamp >= since else 0.0
    # A source's prompts are among the held-out ones.
    prompts = _hash_prompts(recorded.samples, set if set in recorded.samples["set"] else HELD_OUT)
    found: list[ModelVersion] = []
    for number in map(str, range(int(candidate.version) - 1, 0, -1)):  # a search cannot quote every name
        version = find_version(client, candidate.name, number) if number != champion else None
        if version is None:
            continue
        if version.creation_timestamp < since:
            break
        theirs = {value for key, value in version.tags.items() if key.startswith(PROMPTS)}
        if RECORD in version.tags and (not theirs or prompts in theirs):
            found.insert(0, version)
    chosen = {it.tags.get(SWEEP) for it in (candidate, *found) if CHOSEN in it.tags}
    if CHOSEN not in candidate.tags:
        chosen -= {candidate.tags.get(SWEEP)}
    return [it for it in found if CHOSEN in it.tags or it.tags.get(SWEEP, "") not in chosen]


def judge(
    client: MlflowClient,
    candidate: ModelVersion,
    champion: str | None,
    recorded: Recorded,
    config: RunConfig,
    attempt: int,
    num_before: int,
) -> tuple[Verdict, tuple[Change, ...] | None]:
    """Return the gate's verdict on a version, and the prompts to show to a person; None instead of these if no approval
    is needed.

    champion: version that it has to beat; None for the base model. config: of `config_of`. attempt: number of this
    comparison with the champion, from 1. num_before: number of versions in `evaluated_before`. Raises
    NotComparableError if what is needed was not recorded, or was recorded with other prompts or settings.
    """
    refuse_chosen_there(config, recorded.samples)
    trained = Contestant(f"version {candidate.version}", recorded.samples, "trained")
    rival = _rival(client, candidate, recorded, champion)
    try:
        verdict = decide(config, trained, rival, attempt, num_before)
    except ValueError as error:
        raise NotComparableError(f"{error}; a guard can use only metrics that the evaluation recorded") from None
    if why := disagreement(candidate.tags, config.promotion.served_agreement):
        verdict = replace(verdict, accepted=False, reason=f"{why}. {verdict.reason}")
    return verdict, largest_changes(config, trained, rival) if config.promotion.approval else None


def _rival(client: MlflowClient, candidate: ModelVersion, recorded: Recorded, champion: str | None) -> Contestant:
    """Return what the candidate has to beat. This is the champion, as evaluated beside it or by itself on the same
    prompts with the same settings (the reports then have the same key). Without a champion, it is the base model."""
    if champion is None:
        return Contestant("the base model", recorded.samples, "base")
    label, beside = f"champion version {champion}", recorded.report.get("champion")
    version = client.get_model_version(candidate.name, champion)
    if beside == identity(version):
        return Contestant(label, recorded.samples, CHAMPION)
    theirs = read_recorded(client, version)
    if theirs.report["key"] != recorded.report["key"]:
        run = recorded.config["name"]
        raise NotComparableError(
            f"it was not evaluated beside the {label}, but on other prompts or with other settings: "
            f"`grpo stage evaluate --run {run} --force` and `grpo stage register --run {run}` make a version that is"
        )
    return Contestant(label, theirs.samples, "trained")


def read_recorded(client: MlflowClient, version: ModelVersion) -> Recorded:
    """Read what was recorded with a version. Raises NotComparableError if something is missing."""
    run_id, folder = str(version.run_id or ""), version.tags.get(RECORD, "")
    run = if_there(lambda: client.get_run(run_id)) if run_id and folder else None  # None: the run is gone
    with TemporaryDirectory() as local:
        record = Path(local)
        if run:
            # By its address: in a run, MLflow would at each call look for logged models called as the folder is.
            address, uri = append_to_uri_path(run.info.artifact_uri, folder), client.tracking_uri
            if if_there(lambda: list_artifacts(address, tracking_uri=uri)):
                record = Path(download_artifacts(address, dst_path=local, tracking_uri=uri))
        if missing := [name for name in RECORDED if not (record / name).is_file()]:
            raise NotComparableError(
                f"version {version.version} has no {', '.join(missing)} in its MLflow run ({run_id or 'none'}), so "
                "there is nothing to judge it by; `grpo stage register --run NAME` makes a version that has"
            )
        config, report, samples = (record / name for name in RECORDED)
        return Recorded(tomllib.loads(config.read_text()), json.loads(report.read_text()), read_parquet(samples))


def identity(version: ModelVersion) -> dict[str, Any]:
    """Identity of a champion in an evaluation. It includes the MLflow run: if a model is deleted and made again under
    the same name, its versions are numbered from 1 again."""
    return {"model_name": version.name, "version": str(version.version), "run_id": version.run_id}
