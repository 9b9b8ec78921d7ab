"""Conversations on the report: what was said turn by turn, and by whom."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import polars as pl

from grpo_core.data.chat import turns
from grpo_core.environments.calls import ERROR
from tasks.rendering import figures
from tasks.rendering.page import Section
from tasks.reports.record import Record

LONGEST_TEXT = 3000  # characters of a prompt, a completion or a turn
TURNS = {  # colours of a conversation's turns
    "what the policy said: these tokens are trained": "var(--blue)",
    "what tools and environment said: not trained": "var(--grey)",
    "a call that failed": "var(--orange)",
}


def in_training(record: Record) -> Section:
    """Conversations that were trained on. Empty without tools and environment."""
    best_and_worst = {
        f"update {row['step']}: {which} advantage": [_trained_on(row)]
        for batch in record.batches
        if "conversation" in batch.columns
        for which, row in _ends(batch).items()
    }
    text = "The conversations of highest and lowest advantage in the first and in the last generation batch."
    return Section("In training", text if best_and_worst else "", trajectories=best_and_worst)


def _ends(batch: pl.DataFrame) -> dict[str, dict[str, Any]]:
    """The rows of highest and lowest advantage; none if no row has an advantage."""
    ordered = batch.filter(pl.col("advantage").is_finite()).sort("advantage", descending=True, maintain_order=True)
    return {"highest": ordered.row(0, named=True), "lowest": ordered.row(-1, named=True)} if ordered.height else {}


def _trained_on(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of completions/, as `_sample` gives one of an evaluation."""
    trained, tokens = sum(row["trained_tokens"]), len(row["trained_tokens"])
    return {
        "row": None,
        "prompt": messages(row["prompt"]),
        "opening": shortened(row["opening"] or ""),
        "answer": None,
        "category": None,
        "policies": [
            {
                "name": "in training",
                "completion": "",
                "mark": f"advantage {figures.number(row['advantage'])}",
                "tone": "",
                "of_all": "",
                "tokens": f"{trained} trained of {tokens}",
                "truncated": row["truncated"],
                "conversation": conversation({f"trained/{name}": value for name, value in row.items()}, "trained"),
            }
        ],
    }


def conversation(sample: Mapping[str, Any], policy: str) -> dict[str, Any]:
    """A policy's conversation in a row of samples.parquet: its turns and what they are, its rewards and its failure."""
    rewards = {
        name.removeprefix(f"{policy}/rewards/"): figures.NONE if value is None else figures.number(value)
        for name, value in sample.items()
        if name.startswith(f"{policy}/rewards/")
    }
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
        "rewards": ", ".join(f"{name} {value}" for name, value in rewards.items()),
        "failure": shortened(sample[f"{policy}/environment_failure"]),
    }


def _turn(message: Mapping[str, Any]) -> dict[str, Any]:
    """What was said; `kind`: policy, environment, or failed for an answer that says what was wrong with a call."""
    content, is_policy = message["content"], message["role"] == "assistant"
    return {
        "who": "" if is_policy else message.get("name", message["role"]),
        "kind": "policy" if is_policy else "failed" if content.startswith(ERROR) else "environment",
        "text": shortened(content),
        "calls": [shortened(_call(call["function"])) for call in message.get("tool_calls", ())],
    }


def _call(function: Mapping[str, Any]) -> str:
    arguments = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in function["arguments"].items())
    return f"{function['name'] or '(no name)'}({', '.join(arguments)})"


def messages(prompt: Any) -> list[tuple[str, str]]:
    """(role, text) of each message; a plain prompt is one message without a role."""
    return [(role, shortened(text)) for role, text in turns(prompt)]


def shortened(text: str) -> str:
    """The text as the page has it: its beginning."""
    left_out = len(text) - LONGEST_TEXT
    return text if left_out <= 0 else f"{text[:LONGEST_TEXT]} … {left_out:,} more characters"
