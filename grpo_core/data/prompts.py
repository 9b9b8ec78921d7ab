"""Validated Parquet → prompts as token ids, and the order in which they are trained on.

The order is a pure function of seed and rollout number, so a run's place in its data is one number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from grpo_core.config.inputs import ModelConfig


@dataclass(frozen=True)
class Prompts:
    """Rows of a prompt dataset and, row by row, their token ids."""

    rows: list[dict[str, Any]]
    ids: list[list[int]]

    @property
    def max_length(self) -> int:
        return max(map(len, self.ids))


def load_tokenizer(config: ModelConfig) -> Any:
    """The model's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(config.name_or_path, revision=config.revision)


def load_prompts(path: Path, tokenizer: Any) -> Prompts:
    """Read a validated Parquet file (column `prompt`: text or a list of messages) and tokenize its prompts.

    Raises ValueError for a prompt without tokens, and for a tokenizer that ends prompts.
    """
    rows = pq.read_table(path).to_pylist()
    prompts = [row["prompt"] for row in rows]
    ids = encode_prompts(prompts, tokenizer)
    if empty := [row for row, found in enumerate(ids) if not found]:
        raise ValueError(
            f"{path}, row {empty[0]}: the tokenizer makes no token of the prompt {prompts[empty[0]]!r}; leave it out"
        )
    if problem := end_token_problem(tokenizer, prompts[0]):
        raise ValueError(problem)
    return Prompts(rows, ids)


def encode_prompts(prompts: Sequence[Any], tokenizer: Any) -> list[list[int]]:
    """Token ids of standard (text) or conversational prompts, the latter through the chat template."""
    if isinstance(prompts[0], str):
        return tokenizer(list(prompts))["input_ids"]
    conversations = [without_gaps(prompt) for prompt in prompts]
    return tokenizer.apply_chat_template(conversations, add_generation_prompt=True, return_dict=True)["input_ids"]


def end_token_problem(tokenizer: Any, prompt: Any) -> str:
    """What is wrong with a tokenizer that puts its end token after a prompt that is text; "" if it does not.

    A chat template may end a conversation with that token: it belongs to the format that the model was trained on.
    """
    if not isinstance(prompt, str):
        return ""
    ids, bare = (tokenizer(prompt, add_special_tokens=special)["input_ids"] for special in (True, False))
    end = tokenizer.eos_token_id
    if ids[-1:] != [end] or bare[-1:] == [end]:
        return ""
    return (
        f"the tokenizer {tokenizer.name_or_path!r} puts its end token {tokenizer.eos_token!r} after each prompt: "
        "completions would begin after the end of the text. In a copy of the model's folder set add_eos_token to false "
        "in tokenizer_config.json, or take the token out of post_processor in tokenizer.json"
    )


def without_gaps(conversation: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages without their null fields: Arrow gives every message each key that any of them has."""
    return [{key: value for key, value in message.items() if value is not None} for message in conversation]


def decode_completions(
    rows: Sequence[Mapping[str, Any]], prompt_ids: Sequence[list[int]], ids: Sequence[list[int]], tokenizer: Any
) -> list[Any]:
    """Completions as rewards see them: one assistant message if the prompt is a conversation, else the text that
    continues the prompt."""
    alone = tokenizer.batch_decode(ids, skip_special_tokens=True)
    if not rows or not isinstance(rows[0]["prompt"], str):
        return [[{"role": "assistant", "content": text}] for text in alone]
    # Decoded alone, a completion loses its leading space with tokenizers that take the first one for their own.
    prompts = {tuple(prompt): prompt for prompt in prompt_ids}
    shown = tokenizer.batch_decode([*prompts.values()], skip_special_tokens=True)
    before = dict(zip(prompts, shown, strict=True))
    together = [prompt + completion for prompt, completion in zip(prompt_ids, ids, strict=True)]
    whole = tokenizer.batch_decode(together, skip_special_tokens=True)
    # Bytes at the prompt's end that make no character alone may make one with the completion's first bytes.
    return [
        text.removeprefix(before[tuple(prompt)]) if text.startswith(before[tuple(prompt)]) else own
        for prompt, text, own in zip(prompt_ids, whole, alone, strict=True)
    ]
