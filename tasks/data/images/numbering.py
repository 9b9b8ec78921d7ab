"""Puts the numbers of images into the prompts of a run's data, and finds the rows whose images cannot be used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import polars as pl

from grpo_core.config.inputs import DataConfig
from grpo_core.config.run import RunConfig
from grpo_core.data.images import MARK, ImageError, load_images, show_images
from grpo_core.data.processor import load_processor
from tasks.data.images.columns import NAMES, SOURCE, column_of, sources
from tasks.data.images.reading import ImageWriter
from tasks.data.images.tokenizer import ImageTokenizer
from tasks.data.path_or_hub import data_set
from tasks.data.repeats import FINDING
from tasks.data.rows import Rows, kept_on_disk
from tasks.data.sources import Source, folder_of

FEW = 32  # rows whose images are Python objects together
BROKEN, TOO_MANY, MALFORMED = "broken_image", "too_many_images", "malformed_conversation"


@dataclass(frozen=True)
class Numbered:
    """A run's data without images, and with their numbers in the prompts."""

    rows: dict[str, Rows]
    findings: pl.DataFrame
    figures: dict[str, Any]
    tokenizer: ImageTokenizer


class RowError(ValueError):
    """Raised for a row whose images cannot be used; `rule`: the one that it breaks."""

    def __init__(self, rule: str, said: str):
        super().__init__(said)
        self.rule = rule


def refusals(config: RunConfig) -> Iterator[str]:
    """Yield what this configuration asks for that does not work with images, in sentences."""
    engine = config.rollout.engine
    for asked, change in {
        f"rollout.engine = {engine!r}": "'transformers'" if engine != "transformers" else "",
        "environment": "no tools and no environment" if config.environment.is_used else "",
        "teacher": "no teacher" if config.teacher.is_used else "",
        "warm_start": "no warm start" if config.warm_start.is_used else "",
        f"train.sharding = {config.train.sharding!r}": "'none'" if config.train.sharding != "none" else "",
    }.items():
        if change:
            yield f"{asked}: not with images yet, which the data have; choose {change}, or take the images out of them"


def have_images(parts: Mapping[str, Rows]) -> bool:
    """True if a row has an image, or if a column of images is of a type that has none."""
    for rows in parts.values():
        if column_of(rows.schema) is None or "prompt" not in rows.schema:
            continue
        images = sources(rows.schema)
        if images is None or any(_counts(frame, images)["given"].any() for frame in rows.slices()):
            return True
    return False


def _counts(frame: pl.DataFrame, images: pl.Expr) -> pl.DataFrame:
    """Which rows have images, and which have marks in their messages."""
    marks = pl.lit(False)
    if frame.schema["prompt"] != pl.String:
        content = pl.element().struct.field("content")
        marks = pl.col("prompt").list.eval(content.str.contains(MARK, literal=True)).list.any()
    return frame.select(given=images.list.len() > 0, marks=marks)


def unread(parts: Mapping[str, Rows], config: RunConfig) -> tuple[dict[str, Rows], list[str]]:
    """The parts of a run without images, or of a model that reads text alone, and notes on columns that it does not
    read. Raises ConfigError if such a model's messages have images, or if data.columns names them."""
    left, notes = {}, []
    named = any(name in origin.columns for origin in config.data.origins.values() for name in NAMES)
    for name, rows in parts.items():
        images, has_any = sources(rows.schema), False
        for frame in rows.slices() if column_of(rows.schema) else ():
            if images is None:  # a column of that name that has none
                break
            counts = _counts(frame, images)
            has_any |= bool(counts["given"].any())
            if (named and has_any) or (counts["given"] & counts["marks"]).any():
                load_processor(config.model)  # which refuses it
        made = not has_any and rows.schema.get("images") == pl.List(SOURCE)
        left[name] = rows.map(lambda frame: frame.drop("images")) if made else rows
        if has_any:
            notes.append(f"{name}: its images are not read, since {config.model.name_or_path!r} reads text alone")
    return left, notes


def number_images(
    parts: Mapping[str, Rows], places: Mapping[str, Source], data: DataConfig, processor: Any, path: Path
) -> Numbered:
    """Read the images of the parts, once, and write those that differ to `path`. `places`: where each part comes
    from. Those of held-out prompts have the first numbers: other training data leave the validated prompts the same."""
    writer = ImageWriter(path, processor, data.max_image_pixels)
    special = {
        *processor.all_special_multimodal_tokens,
        *processor.tokenizer.convert_ids_to_tokens(processor.image_token_ids),
    }
    found: list[dict[str, Any]] = []
    numbered = {
        name: kept_on_disk(_frames(name, parts[name], folder_of(places[name]), data, writer, special, found))
        for name in sorted(parts, key=lambda name: data_set(name) == "train")
    }
    figures = writer.close()
    shown = show_images(path, processor, load_images(path, processor, frozen=True))
    return Numbered(
        {name: numbered[name] for name in parts}, pl.DataFrame(found, FINDING), figures, ImageTokenizer(shown)
    )


def _frames(
    name: str,
    rows: Rows,
    folder: tuple[Path, bool],
    data: DataConfig,
    writer: ImageWriter,
    special: set[str],
    found: list[dict[str, Any]],
) -> Iterator[pl.DataFrame]:
    """Yield the rows with the numbers in their prompts. Appends to `found` what is wrong with them (FINDING)."""
    for first, frame in rows.numbered():
        images = sources(frame.schema)
        assert images is not None
        prompts = []
        rows_of = (part.select("prompt", given=images).rows() for part in frame.iter_slices(FEW))
        for row, (messages, given) in enumerate(chain.from_iterable(rows_of), first):
            try:
                prompts.append(messages and _with_numbers(messages, given, folder, data, writer, special))
            except RowError as error:
                bare = [{**it, "content": it["content"] and it["content"].replace(MARK, "[image]")} for it in messages]
                prompts.append(bare)
                column = column_of(frame.schema) if error.rule == BROKEN else "prompt"
                said = {"column": column, "check": error.rule, "value": str(error)}
                found.append({"dataset": name, "row": row, "other": None, **said})
        yield frame.drop(NAMES, strict=False).with_columns(prompt=pl.Series(prompts, dtype=frame.schema["prompt"]))


def _with_numbers(
    messages: Sequence[Mapping[str, Any]],
    given: Sequence[Mapping[str, Any]],
    folder: tuple[Path, bool],
    data: DataConfig,
    writer: ImageWriter,
    special: set[str],
) -> list[dict[str, Any]]:
    contents = [message["content"] for message in messages]
    places = sum(content.count(MARK) for content in contents if content)
    if not given and not places:
        return [*map(dict, messages)]
    if len(given) > data.max_images:
        raise RowError(TOO_MANY, f"{len(given)} images, and data.max_images = {data.max_images}")
    asked = next((place for place, it in enumerate(messages) if it["role"] == "user"), None)
    if not places and asked is not None:  # before the first text of the user, as in TRL
        contents[asked] = MARK * len(given) + (contents[asked] or "")
        places = len(given)
    if places != len(given):
        raise RowError(MALFORMED, f"{len(given)} images, and {places} places for one in the messages")
    for text in special:
        if any(text in content for content in contents if content):
            raise RowError(MALFORMED, f"a message says {text!r}, which stands for an image to the model")
    numbers = iter([_number(place, it, folder, writer) for place, it in enumerate(given)])
    return [
        {**it, "content": content and _numbered(content, numbers)}
        for it, content in zip(messages, contents, strict=True)
    ]


def _number(place: int, source: Mapping[str, Any], folder: tuple[Path, bool], writer: ImageWriter) -> int:
    try:
        return writer.number(source, *folder)
    except ImageError as error:
        raise RowError(BROKEN, f"image {place}: {error}") from error


def _numbered(content: str, numbers: Iterator[int]) -> str:
    first, *others = content.split(MARK)
    return first + "".join(f"{MARK}{next(numbers)}{MARK}{text}" for text in others)
