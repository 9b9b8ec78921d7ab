"""Validated Parquet → prompts as token ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from grpo_core.config.inputs import ModelConfig
from grpo_core.data.chat import NO_OPTIONS, encode_prompts, end_token_problem


@dataclass(frozen=True)
class Prompts:
    """Rows of a prompt dataset, and the token ids of each."""

    rows: list[dict[str, Any]]
    ids: list[list[int]]

    @property
    def max_length(self) -> int:
        return max(map(len, self.ids))


def load_tokenizer(config: ModelConfig) -> Any:
    """The model's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(config.name_or_path, revision=config.revision)


def load_prompts(
    path: Path,
    tokenizer: Any,
    options: Mapping[str, Any] = NO_OPTIONS,
    encode: Callable[[Mapping[str, Any]], list[int]] | None = None,
) -> Prompts:
    """Read a validated Parquet file (column `prompt`: text or a list of messages) and tokenize its prompts. `options`:
    variables of the chat template; `encode`: what gives a row's tokens, if not the tokenizer alone.

    Raises ValueError for a prompt without tokens, and for a tokenizer that ends prompts.
    """
    rows = pq.read_table(path).to_pylist()
    prompts = [row["prompt"] for row in rows]
    ids = [encode(row) for row in rows] if encode else encode_prompts(prompts, tokenizer, options)
    if empty := [row for row, found in enumerate(ids) if not found]:
        raise ValueError(
            f"{path}, row {empty[0]}: the tokenizer turns the prompt {prompts[empty[0]]!r} into no tokens; leave it out"
        )
    if problem := end_token_problem(tokenizer, prompts[0]):
        raise ValueError(problem)
    return Prompts(rows, ids)
