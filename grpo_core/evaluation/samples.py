"""samples.parquet: one row per completion, with what each policy answered."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from grpo_core.config.columns import ANSWER
from grpo_core.config.run import RunConfig
from grpo_core.data.chat import plain
from grpo_core.data.prompts import Prompts
from grpo_core.data.units import group_of, whole_row
from grpo_core.errors import GrpoError
from grpo_core.rewards.builtin.record import written
from grpo_core.rewards.contract import Reward
from grpo_core.system.tables import read_parquet

if TYPE_CHECKING:
    from grpo_core.rollout.collect import Sample

Columns = dict[str, dict[str, list[Any]]]  # of samples.parquet, by set
GROUP = "group"  # the column with the value of evaluation.group_column
SHOWN = ("opening", "conversation", "turns", "tool_calls", "failed_tool_calls", "environment_failure")


def answer_columns(policy: str, samples: Sequence[Sample], rewards: Sequence[Reward]) -> dict[str, list[Any]]:
    """Columns of samples.parquet for one policy, except its KL."""
    from grpo_core.rollout.records import conversation_columns, logged_columns

    columns: dict[str, list[Any]] = {
        f"{policy}/completion": [sample.text for sample in samples],
        f"{policy}/completion_tokens": [sample.completion.sampled_tokens for sample in samples],
        f"{policy}/truncated": [sample.completion.truncated for sample in samples],
    }
    columns |= {f"{policy}/{name}": values for name, values in conversation_columns(samples).items() if name in SHOWN}
    for k, reward in enumerate(rewards):
        values = [sample.rewards[k] for sample in samples]
        columns[f"{policy}/rewards/{reward.name}"] = [None if math.isnan(value) else value for value in values]
    return columns | {f"{policy}/{name}": texts for name, texts in logged_columns(samples).items()}


def answers_of(policy: str, samples: Path, prompts: Columns) -> Columns:
    """A policy's columns of each set, from the samples.parquet of another run. `prompts`: the columns of the prompts.
    Raises GrpoError if the rows are not of these prompts."""
    table, found = read_parquet(samples).sort("set", "row", "sample"), {}
    for name, columns in prompts.items():
        of_set = table.filter(set=name)
        if of_set["row"].to_list() != columns["row"] or of_set["sample"].to_list() != columns["sample"]:
            raise GrpoError(f"{samples}: {of_set.height} rows of the set {name!r}, not those of {len(columns['row'])}")
        found[name] = of_set.select(pl.col(f"^{policy}/.*$")).to_dict(as_series=False)
    return found


def samples_table(columns: Mapping[str, list[Any]], scores: Iterable[str]) -> pl.DataFrame:
    """The samples of one set, with the same types even for empty columns; `scores`: the columns of rewards."""
    types: dict[str, Any] = {"answer": pl.String, "category": pl.String, **dict.fromkeys(scores, pl.Float64)}
    types["images"] = pl.List(pl.Int64)
    types |= {name: pl.String for name in columns if name.partition("/")[2].startswith("logged/")}
    return pl.DataFrame(columns, schema_overrides={name: kind for name, kind in types.items() if name in columns})


def prompt_columns(name: str, prompts: Prompts, config: RunConfig) -> dict[str, list[Any]]:
    """The columns of samples.parquet that are the same for all policies: one entry per sample of a prompt."""
    n, rows = config.evaluation.num_samples, prompts.rows
    columns: dict[str, list[Any]] = {"prompt": [plain(row["prompt"]) for row in rows]}
    for column, source in ((ANSWER, ANSWER), ("category", config.evaluation.category_column)):
        if source in rows[0]:
            columns[column] = [None if row[source] is None else written(row[source]) for row in rows]
    if config.evaluation.group_column:
        columns[GROUP] = [group_of(row, config.evaluation.group_column) for row in rows]
    if config.data.sources:
        columns["source"] = [row["source"] for row in rows]
    if prompts.images:
        columns["images"] = [row["images"] for row in rows]
    if config.environment.factories:  # an environment begins with the whole row: the same prompt may be another task
        columns["task"] = [whole_row(row) for row in rows]
    elif prompts.images:  # the same text beside another image
        digests = iter(prompts.images.digests([number for own in columns["images"] for number in own]))
        shown = [[next(digests) for _ in own] for own in columns["images"]]
        pairs = zip(columns["prompt"], shown, strict=True)
        columns["task"] = [whole_row({"prompt": prompt, "images": own}) for prompt, own in pairs]
    places: dict[str, list[Any]] = {
        "set": [name] * n * len(rows),
        "row": [row for row in range(len(rows)) for _ in range(n)],
        "sample": list(range(n)) * len(rows),
    }
    return places | {column: [value for value in values for _ in range(n)] for column, values in columns.items()}
