"""Lengths of prompts before they are validated, for forecasts. Doesn't import transformers, which takes seconds."""

from __future__ import annotations

import polars as pl
from tokenizers import Tokenizer

from grpo_core.config.run import RunConfig
from grpo_core.data import own_code
from grpo_core.planning.shapes import ForecastError, PromptLengths, config_file
from tasks.data.sources import SourceError, load_head

FIRST = 200  # prompts


def first_lengths(config: RunConfig) -> PromptLengths | None:
    """Tokens of the first training prompts, without a chat template. None if data or tokenizer are not files on this
    machine, or cannot be read, or if a user's function makes the prompts: a plan does not run it."""
    if own_code.named(config.data):
        return None
    try:
        file = config_file(config.model.name_or_path, config.model.revision).with_name("tokenizer.json")
        heads = [_texts(head["prompt"].drop_nulls()) for head in load_head(config.data, FIRST)]
    except (ForecastError, SourceError, pl.exceptions.PolarsError):
        return None
    prompts = pl.concat(heads)
    try:
        encoded = Tokenizer.from_file(str(file)).encode_batch_fast(prompts.to_list())
    except Exception:  # tokenizers raises no other class
        return None
    lengths = [len(prompt.ids) for prompt in encoded]
    if not any(lengths):
        return None
    less = "a chat template and tools" if config.environment.is_used else "a chat template"
    how = f"of the first {len(lengths)} prompts, without {less}; --prompt-tokens says better"
    return PromptLengths(sum(lengths) / len(lengths), max(lengths), how)


def _texts(prompts: pl.Series) -> pl.Series:
    if prompts.dtype == pl.String:
        return prompts
    return prompts.list.eval(pl.element().struct.field("content")).list.join("\n").drop_nulls()
