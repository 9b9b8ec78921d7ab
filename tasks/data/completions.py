"""A training's samples: selects rows of its completions/ by their figures, and then reads these rows completely.

Texts and tokens are read only for the selected rows, since all of them may be larger than memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_core import run_files
from grpo_core.config.inputs import RewardConfig
from grpo_core.data.chat import turns
from grpo_core.data.images import in_words
from grpo_core.data.recording import KEY
from grpo_core.errors import GrpoError
from grpo_core.rewards.composition import weighted_sum
from grpo_core.system.tables import read_parquet

NEEDED = {"step", "row", "prompt", "completion", "advantage", "completion_tokens", "truncated"}
PLACE = ("batch", "place")  # of a row: number of its generation batch's file, and number of the row in it


class NoRolloutsError(GrpoError):
    """Raised if there are no rollouts, or none that can be read; the message says why and what to do."""


def recorded_batches(training: Path) -> list[Path]:
    """Files of the generation batches in a training's folder, in order."""
    return sorted((training / run_files.COMPLETIONS).glob("*.parquet"))


def read_figures(files: Sequence[Path], rewards: Sequence[RewardConfig]) -> pl.DataFrame:
    """Read the figures of all completions, without texts and tokens: PLACE, `group` (in its batch), `step`, `row`,
    `advantage`, `completion_tokens`, `truncated`, `rewards/NAME` and `reward`, the weighted sum that the policy was
    trained on (NaN if nothing was scored).

    Raises NoRolloutsError if a file cannot be read or lacks one of these columns.
    """
    return pl.concat([_figures_of(file, number, rewards) for number, file in enumerate(files)], how="diagonal_relaxed")


def _figures_of(file: Path, number: int, rewards: Sequence[RewardConfig]) -> pl.DataFrame:
    given = [f"rewards/{reward.name}" for reward in rewards]
    figures = [*sorted(NEEDED - {"prompt", "completion"}), *given]
    try:
        schema = pq.read_schema(file)
        if missing := sorted({*NEEDED, *given} - {*schema.names}):
            raise NoRolloutsError(
                f"{file} lacks {', '.join(missing)}: it was written by an older version, or with other rewards than "
                "config.toml names; train again, or restore the rewards in the configuration"
            )
        known = json.loads((schema.metadata or {}).get(KEY, b"{}"))
        found = read_parquet(file, columns=figures)
    except (OSError, pa.ArrowInvalid, pl.exceptions.ComputeError) as error:
        raise NoRolloutsError(f"{file} cannot be read: {error}; delete it to look at the others") from error
    values = found.select(pl.col(given).cast(pl.Float64).fill_null(float("nan"))).to_numpy()
    return found.with_columns(
        pl.lit(number).alias("batch"),
        pl.int_range(found.height).alias("place"),
        (pl.int_range(found.height) // known.get("num_generations", 1)).alias("group"),
        pl.Series("reward", weighted_sum(values, rewards), dtype=pl.Float64),
    )


def read_rows(files: Sequence[Path], chosen: pl.DataFrame) -> list[dict[str, Any]]:
    """Read the chosen rows of `read_figures` in their order, with all columns of their files."""
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for number in chosen["batch"].unique().sort():
        places = chosen.filter(batch=number)["place"].to_list()
        rows = read_parquet(files[number])[places].to_dicts()
        found |= {(number, place): row for place, row in zip(places, rows, strict=True)}
    return [
        {**found[row["batch"], row["place"]], **{name: row[name] for name in (*PLACE, "group", "reward")}}
        for row in chosen.iter_rows(named=True)
    ]


def with_text(files: Sequence[Path], figures: pl.DataFrame, text: str) -> pl.DataFrame:
    """Keep the rows of `figures` whose prompt or completion, or any turn of a conversation, contains the text, ignoring
    case."""
    inside, escaped = text.lower(), json.dumps(text, ensure_ascii=False)[1:-1].lower()
    kept = []
    for (number,), rows in figures.group_by("batch", maintain_order=True):
        names = {"row", "prompt", "completion", "opening", "conversation"}
        whole = read_parquet(files[number], columns=[n for n in pq.read_schema(files[number]).names if n in names])
        asked = [row for row, prompt in _prompts(whole).items() if inside in prompt.lower()]
        has = pl.col("row").is_in(asked)
        for column in names & {*whole.columns} - {"row", "prompt"}:
            needle = escaped if column == "conversation" else inside  # a conversation is JSON
            has |= pl.col(column).fill_null("").str.to_lowercase().str.contains(needle, literal=True)
        found = whole.select(has.alias("has"))["has"].arg_true()
        kept.append(rows.filter(pl.col("place").is_in(found.implode())))
    return pl.concat(kept) if kept else figures


def prompts_of(files: Sequence[Path]) -> dict[int, str]:
    """Text of each sampled prompt, by its row in train.parquet."""
    found: dict[int, str] = {}
    for file in files:
        found = _prompts(read_parquet(file, columns=["row", "prompt"])) | found
    return found


def _prompts(table: pl.DataFrame) -> dict[int, str]:
    distinct = table.select("row", "prompt").unique("row", keep="first", maintain_order=True)
    return {row: "\n".join(text for _, text in turns(in_words(prompt))) for row, prompt in distinct.iter_rows()}
