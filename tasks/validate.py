"""Stage 1, validate: the data contract. Every failure in one report; nothing is trained on data that breaks it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pandera.pandas as pa
from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.client.schemas.objects import State

from grpo_core.config import RunConfig
from grpo_core.data import encode_prompts
from grpo_core.rewards.contract import resolve
from tasks.sources import load_source
from tasks.stage import VALIDATE, Context, StageError, run_stage
from tasks.storage import remove, write_text

ROLES = {"system", "user", "assistant"}
FAILURES_SHOWN = 10
FAILURES_IN_TABLE = 200


@task(name="validate")
def validate(run: Path) -> State[None]:
    return run_stage(VALIDATE, run, _work)


def _work(context: Context) -> dict[str, Any]:
    config, log = context.config, get_run_logger()
    frames = {
        "train": load_source("data.train", config.data.train, config.data.train_split),
        "eval": load_source("data.eval", config.data.eval, config.data.eval_split),
    }
    failures = check(frames, config)
    rejected = context.run / "dataset.rejected.json"
    remove(rejected)
    if failures:
        write_text(rejected, json.dumps(failures, indent=2, default=str) + "\n")
        create_table_artifact(key="data-failures", table=[_shown(f) for f in failures[:FAILURES_IN_TABLE]])
        lines = "\n".join(
            f"  {f['dataset']} row {f['row']}, column {f['column']}: {f['check']}; value {_short(f['value'])}"
            for f in failures[:FAILURES_SHOWN]
        )
        more = f"\n  … and {len(failures) - FAILURES_SHOWN} more" if len(failures) > FAILURES_SHOWN else ""
        raise StageError(
            f"the data breaks its contract in {len(failures)} places:\n{lines}{more}\nall of them: {rejected}"
        )
    needed = _needed_columns(config)
    for name, frame in frames.items():
        frame.to_parquet(context.partial / f"{name}.parquet", index=False)
        log.info("%s: %d rows, columns %s", name, len(frame), ", ".join(map(str, frame.columns)))
    report = {
        "num_prompts": {name: len(frame) for name, frame in frames.items()},
        "columns": {"prompt": ["rollout"], **needed},
        "sources": {"train": config.data.train, "eval": config.data.eval},
    }
    create_markdown_artifact(key="data-report", markdown=_markdown(report))
    return report


def check(frames: dict[str, pd.DataFrame], config: RunConfig) -> list[dict[str, Any]]:
    """Every way in which the data breaks its contract, as dataset, row, column, check, value; none when it is sound."""
    schema = build_schema(config)
    failures: list[dict[str, Any]] = []
    for name, frame in frames.items():
        if frame.empty:
            failures.append(_failure(name, None, None, "has at least one row", 0))
            continue
        try:
            schema.validate(frame, lazy=True)
        except pa.errors.SchemaErrors as errors:
            failures += [_from_pandera(name, case) for case in errors.failure_cases.to_dict("records")]
    if failures:
        return failures
    return [*_mixed(frames)] or [*_overlap(frames), *_too_long(frames, config)]


def build_schema(config: RunConfig) -> pa.DataFrameSchema:
    """The columns that rollout and rewards ask for: `prompt`, and each reward's own, none of them null."""
    prompt = pa.Column(
        None,
        [
            pa.Check(_is_prompt, element_wise=True, error="is text, or a list of {role, content} ending with the user"),
            pa.Check(_is_not_blank, element_wise=True, error="is not blank"),
        ],
    )
    columns = {
        column: pa.Column(
            None,
            pa.Check(_is_not_blank, element_wise=True, error=f"is not blank (needed by {', '.join(rewards)})"),
        )
        for column, rewards in _needed_columns(config).items()
    }
    return pa.DataFrameSchema({"prompt": prompt, **columns}, strict=False)


def _needed_columns(config: RunConfig) -> dict[str, list[str]]:
    """Column → the rewards that read it."""
    needed: dict[str, list[str]] = {}
    for reward in map(resolve, config.rewards):
        for column in reward.columns:
            needed.setdefault(column, []).append(reward.name)
    return needed


def _is_prompt(prompt: Any) -> bool:
    if isinstance(prompt, str):
        return True
    return (
        hasattr(prompt, "__len__")
        and len(prompt) > 0
        and all(isinstance(m, dict) and m.get("role") in ROLES and isinstance(m.get("content"), str) for m in prompt)
        and prompt[-1]["role"] == "user"
    )


def _is_not_blank(value: Any) -> bool:
    return bool(value.strip()) if isinstance(value, str) else True


def _mixed(frames: dict[str, pd.DataFrame]) -> Iterable[dict[str, Any]]:
    is_text = isinstance(frames["train"]["prompt"].iloc[0], str)
    for name, frame in frames.items():
        for row, prompt in frame["prompt"].items():
            if isinstance(prompt, str) != is_text:
                form = "text" if is_text else "a conversation"
                yield _failure(name, row, "prompt", f"is {form}, like the first prompt of train", prompt)


def _overlap(frames: dict[str, pd.DataFrame]) -> Iterable[dict[str, Any]]:
    seen = set(frames["train"]["prompt"].map(_identity))
    for row, prompt in frames["eval"]["prompt"].items():
        if _identity(prompt) in seen:
            yield _failure("eval", row, "prompt", "does not appear in train", prompt)


def _too_long(frames: dict[str, pd.DataFrame], config: RunConfig) -> Iterable[dict[str, Any]]:
    from transformers import AutoConfig, AutoTokenizer

    model, revision = config.model.name_or_path, config.model.revision
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, revision=revision)
        context = AutoConfig.from_pretrained(model, revision=revision).max_position_embeddings
    except Exception as error:
        raise StageError(
            f"model.name_or_path = {model!r}: its tokenizer and config cannot be loaded: {error}"
        ) from error
    room = context - config.rollout.max_completion_length
    for name, frame in frames.items():
        for row, ids in zip(frame.index, encode_prompts(_plain(frame["prompt"]), tokenizer), strict=True):
            if len(ids) > room:
                rule = f"at most {room} tokens (context {context} − max_completion_length {context - room})"
                yield _failure(name, row, "prompt", rule, f"{len(ids)} tokens")


def _plain(prompts: pd.Series) -> list[Any]:
    return [prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts]


def _identity(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(list(prompt), sort_keys=True)


def _failure(dataset: str, row: Any, column: Any, check: Any, value: Any) -> dict[str, Any]:
    return {"dataset": dataset, "row": row, "column": column, "check": check, "value": value}


def _from_pandera(dataset: str, case: dict[str, Any]) -> dict[str, Any]:
    if case["check"] == "column_in_dataframe":
        return _failure(dataset, None, case["failure_case"], "the column is there", None)
    row = None if pd.isna(case["index"]) else int(case["index"])
    check = "is not null" if case["check"] == "not_nullable" else case["check"]
    return _failure(dataset, row, case["column"], check, case["failure_case"])


def _shown(failure: dict[str, Any]) -> dict[str, Any]:
    return {**failure, "value": _short(failure["value"])}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _markdown(report: dict[str, Any]) -> str:
    rows = "\n".join(
        f"| {name} | {count:,} | {report['sources'][name]} |" for name, count in report["num_prompts"].items()
    )
    columns = "\n".join(f"- `{column}`, read by {', '.join(readers)}" for column, readers in report["columns"].items())
    return f"# Data report\n\n| dataset | prompts | source |\n|---|---|---|\n{rows}\n\nColumns:\n\n{columns}\n"
