"""A tokenizer for prompts with images, while data are checked.

There, each mark is followed by its image's number and another mark. So a prompt is known by its text alone: equal texts
have equal images, and nothing else is needed to count its tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import polars as pl

from grpo_core.data.images import MARK, PromptImages, layout, render

NUMBERED = f"{MARK}(\\d+){MARK}"
_NUMBERED = re.compile(NUMBERED)
Messages = Sequence[Mapping[str, Any]]


class ImageTokenizer:
    """A model's tokenizer whose chat template writes images, and which gives their tokens, as the model's processor
    does."""

    def __init__(self, shown: PromptImages):
        self.shown, self.chat_template = shown, shown.processor.chat_template

    def __getattr__(self, name: str) -> Any:
        return getattr(self.shown.processor.tokenizer, name)

    def __call__(self, *given: Any, **options: Any) -> Any:
        return self.shown.processor.tokenizer(*given, **options)

    def apply_chat_template(
        self, messages: Any, tokenize: bool = True, return_dict: bool = False, **options: Any
    ) -> Any:
        """As that of a tokenizer, for one conversation or several. Raises ValueError if the chat template leaves an
        image out."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        made = [self._made(each, tokenize, options) for each in (messages if several else [messages])]
        found = made if several else made[0]
        return {"input_ids": found} if return_dict else found

    def most_tokens(self, prompts: pl.Series) -> pl.Series:
        """Upper bound of the tokens that each prompt has for its images, with what template and processor put around
        them."""
        own = prompts.to_frame("prompt").select(numbers()).to_series()
        return own.list.eval(pl.element().replace_strict(self._most, return_dtype=pl.Int64)).list.sum()

    @cached_property
    def _most(self) -> dict[int, int]:
        """Upper bound of the tokens for each image."""
        processor, most = self.shown.processor, 2**20
        with suppress(Exception):  # the template needs other messages: then prompts are tokenized
            most = len(render(processor, [{"role": "user", "content": MARK}]).encode())
        [placeholder] = processor.tokenizer.convert_ids_to_tokens(processor.image_token_ids)
        layouts = [layout(processor, *map(int, size)) for size in self.shown.sizes]
        around = [len(it.text.encode()) - it.tokens * len(placeholder.encode()) for it in layouts]
        return {number: it.tokens + more + most for number, (it, more) in enumerate(zip(layouts, around, strict=True))}

    def _made(self, numbered: Messages, tokenize: bool, options: Mapping[str, Any]) -> Any:
        messages, numbers = _apart(numbered)
        if tokenize:
            return self.shown.encode(messages, numbers, options)
        processor = self.shown.processor
        text = render(processor, messages, options)
        if numbers and text.count(processor.image_token) != len(numbers):
            raise ValueError("the chat template leaves images out")
        return text


def _apart(messages: Messages) -> tuple[list[dict[str, Any]], list[int]]:
    """The messages with mere marks, and the numbers."""
    contents = [message.get("content") for message in messages]
    numbers = [int(number) for content in contents if content for number in _NUMBERED.findall(content)]
    bare = [content and _NUMBERED.sub(MARK, content) for content in contents]
    return [{**it, "content": content} for it, content in zip(messages, bare, strict=True)], numbers


def texts_between(content: str) -> Iterator[str]:
    """The texts of a message before, between and after its images."""
    return (text for place, text in enumerate(_NUMBERED.split(content)) if place % 2 == 0)


def with_column(frame: pl.DataFrame) -> pl.DataFrame:
    """Move the numbers from the prompts into the column `images`."""
    content = pl.element().struct.field("content")
    bare = pl.element().struct.with_fields(content=content.str.replace_all(NUMBERED, MARK))
    return frame.with_columns(prompt=pl.col("prompt").list.eval(bare), images=numbers())


def numbers() -> pl.Expr:
    """The numbers of each prompt's images."""
    content = pl.element().struct.field("content").fill_null("")
    marked = pl.col("prompt").list.eval(content).list.join("").str.extract_all(NUMBERED)
    return marked.list.eval(pl.element().str.strip_chars(MARK).cast(pl.Int64)).fill_null([])
