"""The demonstrations of a warm start: read, encoded as the policy would sample them, and refused where nothing could be
learnt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_core.config.run import RunConfig
from grpo_core.data.chat import turns
from grpo_core.data.demonstrations import SCHEMA, read_demonstrations
from grpo_core.environments.demonstrations import FORMS, Demonstration, DemonstrationError, encode
from grpo_core.environments.setting import end_texts
from grpo_core.environments.turns import TemplateError, TurnFormat
from tasks.data.lengths import embedding_rows, load_tokenizer_and_context
from tasks.data.rows import Rows
from tasks.data.sources import Source, SourceError, load_source

SHOWN = 10  # rows that a refusal names
BLANKS = dict.fromkeys(map(ord, " \t\n\r\u00a0\u200b"))  # left out of prompts that are compared
Tools = Callable[[Mapping[str, Any]], list[Mapping[str, Any]]]  # JSON schemas that the prompt of a row shows


def demonstration_source(config: RunConfig) -> Source:
    """Source of the demonstrations. Only for a warm start that is not from the probe."""
    keys = config.warm_start
    assert keys.source is not None
    return Source("warm_start.demonstrations", keys.source, keys.split, None, keys.revision)


def load_demonstrations(config: RunConfig) -> Rows:
    """Load the rows. Raises SourceError if they cannot be read, or have neither form's columns."""
    source = demonstration_source(config)
    rows = load_source(source)
    if "messages" not in rows.columns and not {"prompt", "completion"} <= {*rows.columns}:
        raise SourceError(f"{source} has the columns {', '.join(rows.columns)}: demonstrations need {FORMS}")
    return rows


def write_demonstrations(config: RunConfig, tools: Tools, held_out: Mapping[str, Rows], path: Path) -> dict[str, Any]:
    """Write the token ids of all demonstrations and return their number and sizes in tokens. `held_out`: prompts by
    set, which a demonstration must not answer, unless data.checks.near_overlap allows it, or drops the row.

    Raises SourceError if a row cannot be learnt from; the message names the first of them, and the rules.
    """
    rows, source = load_demonstrations(config), demonstration_source(config)
    tokenizer, context = load_tokenizer_and_context(config.model)
    turn_format = TurnFormat(tokenizer, end_texts(config, tokenizer), config.data.chat_template_kwargs)
    known, overlap = embedding_rows(config.model), config.data.checks.near_overlap
    frames = (frame for rows in held_out.values() for frame in rows.slices() if overlap != "warn")
    shown = {_key(prompt) for frame in frames for prompt in frame["prompt"]}
    problems, broken, dropped = list[str](), 0, 0
    with pq.ParquetWriter(path, SCHEMA) as file:
        for first, frame in rows.numbered():
            found = list[Demonstration]()
            for number, row in enumerate(frame.iter_rows(named=True), first):
                try:
                    made = encode(row, turn_format, tools(row), config.rollout.stop)
                    is_held_out = bool(shown) and _key(_asked(row)) in shown
                    if is_held_out and overlap == "drop":
                        dropped += 1
                        continue
                    problem = next(_problems(made, context, known, is_held_out), "")
                except (DemonstrationError, TemplateError) as error:
                    problem = str(error)
                if not problem:
                    found.append(made)
                    continue
                broken += 1
                if len(problems) < SHOWN:
                    problems.append(f"  row {number}: {problem}")
            file.write_table(pa.Table.from_pylist([vars(each) for each in found], SCHEMA))
    if broken:
        raise SourceError(
            f"{source}: {broken:,} of {rows.height:,} rows cannot be learnt from:\n" + "\n".join(problems)
        )
    written = read_demonstrations(path)
    if not len(written.rows):
        raise SourceError(f"{source} has no rows" + f" left: {dropped:,} were dropped" * bool(dropped))
    return {**written.figures, "dropped": dropped}


def _problems(made: Demonstration, context: int | None, known: int, is_held_out: bool) -> Iterator[str]:
    ids = made.prompt_ids + made.completion_ids
    if not made.prompt_ids or not any(made.trained_tokens):
        yield "the tokenizer turns its prompt, or what the assistant says, into no tokens"
    if context is not None and len(ids) > context:
        yield f"it has {len(ids):,} tokens, and the model takes {context:,}; shorten it, or leave it out"
    if max(ids, default=0) >= known:
        yield f"it has the token {max(ids)}, and the model's embedding {known:,} rows; leave that token out"
    if is_held_out:
        yield (
            "its prompt is a held-out one, on which the run is evaluated; leave it out (data.checks.near_overlap = "
            "'drop' does that, 'warn' keeps it)"
        )


def _key(prompt: Any) -> str:
    """A prompt without case and white space, by which it is compared; messages with their roles."""
    return "".join(f"{role}:{text}" for role, text in turns(prompt)).casefold().translate(BLANKS)


def _asked(row: Mapping[str, Any]) -> Any:
    """The prompt of a row that can be encoded: of messages, those before the first turn of the assistant."""
    given = row.get("messages")
    return [*takewhile(lambda message: message["role"] != "assistant", given)] if given else row["prompt"]
