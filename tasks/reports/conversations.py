"""Conversations in the report: who said what, turn by turn."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import polars as pl

from grpo_core.data.chat import turns
from grpo_core.data.images import MARK, ImageFiles, open_image
from grpo_core.environments.calls import ERROR
from tasks.rendering import figures
from tasks.rendering.page import Section
from tasks.rendering.pictures import Picture, Pictures
from tasks.rendering.visible import shortened, visible
from tasks.reports.record import Record

TURNS = {  # colours of a conversation's turns
    "what the policy said: these tokens are trained": "var(--blue)",
    "what tools and environment said: not trained": "var(--grey)",
    "a call that failed": "var(--orange)",
}


def in_training(record: Record, pictures: Pictures) -> Section:
    """Section with conversations that were trained on; empty without tools and environment."""
    best_and_worst = {
        f"update {row['step']}: {which} advantage": [trained_on(row, pictures=pictures)]
        for batch in record.batches
        if "conversation" in batch.columns
        for which, row in _ends(batch).items()
    }
    text = "The conversations of highest and lowest advantage in the first and in the last generation batch."
    return Section("In training", text if best_and_worst else "", trajectories=best_and_worst)


def _ends(batch: pl.DataFrame) -> dict[str, dict[str, Any]]:
    """Rows of highest and lowest advantage; empty if no row has an advantage."""
    ordered = batch.filter(pl.col("advantage").is_finite()).sort("advantage", descending=True, maintain_order=True)
    return {"highest": ordered.row(0, named=True), "lowest": ordered.row(-1, named=True)} if ordered.height else {}


def trained_on(
    row: Mapping[str, Any],
    name: str = "in training",
    pieces: Sequence[Any] = (),
    pictures: Pictures | None = None,
) -> dict[str, Any]:
    """Convert a row of completions/ to the form in which the report's `_sample` gives evaluated samples. `pieces`: its
    coloured tokens; `pictures`: the images of the page, None on one of text."""
    masks = row.get("trained_tokens")
    advantage = f"advantage {figures.number(row['advantage'])}"
    return {
        "row": row.get("row"),
        "prompt": messages(row["prompt"], pictures.of(row.get("images") or ()) if pictures else ()),
        "opening": shortened(row.get("opening") or ""),
        "answer": None,
        "category": None,
        "policies": [
            {
                "name": name,
                "completion": shortened(row["completion"]),
                "mark": f"reward {figures.number(row['reward'])}, {advantage}" if "reward" in row else advantage,
                "tone": "",
                "of_all": "",
                "tokens": f"{sum(masks)} trained of {len(masks)}" if masks else row["completion_tokens"],
                "truncated": row["truncated"],
                "rewards": rewards_line(row) if masks is None else "",
                "pieces": pieces,
                "conversation": conversation({f"trained/{name}": value for name, value in row.items()}, "trained")
                if masks
                else None,
            }
        ],
    }


def rewards_line(row: Mapping[str, Any], prefix: str = "rewards/") -> str:
    """Write each reward's value, before its weight: `numeric_match 1.000, length –`."""
    given = {name.removeprefix(prefix): value for name, value in row.items() if name.startswith(prefix)}
    return ", ".join(
        f"{visible(name)} {figures.NONE if value is None else figures.number(value)}" for name, value in given.items()
    )


def conversation(sample: Mapping[str, Any], policy: str) -> dict[str, Any]:
    """Convert a policy's conversation in a row of samples.parquet: its turns and their kinds, its rewards and its
    failure."""
    return {
        "turns": [_turn(message) for message in json.loads(sample[f"{policy}/conversation"])],
        "counts": ", ".join(
            f"{count} {what}{'' if count == 1 else 's'}"
            for count, what in [
                (sample[f"{policy}/turns"], "turn"),
                (sample[f"{policy}/tool_calls"], "call"),
                (sample[f"{policy}/failed_tool_calls"], "failed call"),
            ]
            if count
        ),
        "rewards": rewards_line(sample, f"{policy}/rewards/"),
        "failure": shortened(sample[f"{policy}/environment_failure"]),
    }


def _turn(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message to a turn. `kind`: policy, environment, or failed for an answer that reports a wrong call."""
    content, is_policy = message["content"], message["role"] == "assistant"
    return {
        "who": "" if is_policy else visible(message.get("name", message["role"])),
        "kind": "policy" if is_policy else "failed" if content.startswith(ERROR) else "environment",
        "text": shortened(content),
        "calls": [shortened(_call(call["function"])) for call in message.get("tool_calls", ())],
    }


def _call(function: Mapping[str, Any]) -> str:
    arguments = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in function["arguments"].items())
    return f"{function['name'] or '(no name)'}({', '.join(arguments)})"


def messages(prompt: Any, pictures: Iterable[Picture] = ()) -> list[tuple[str, list[str | Picture]]]:
    """(role, text) of each message; a text prompt is one message without a role. A text is divided by its
    images, which are those of `pictures` in order."""
    left = iter(pictures)
    return [(role, _pieces(text, left)) for role, text in turns(prompt)]


def _pieces(text: str, pictures: Iterator[Picture]) -> list[str | Picture]:
    first, *others = text.split(MARK)
    pieces: list[str | Picture] = [shortened(first)]
    for other in others:
        pieces += [next(pictures, "[image]"), shortened(other)]
    return pieces


def pictures_of(files: ImageFiles | None) -> Pictures:
    """The images in these files, for one page."""
    return Pictures(None if files is None else lambda number: open_image(files.read([number])[0]))
