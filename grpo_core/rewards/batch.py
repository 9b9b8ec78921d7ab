"""Completions as rewards see them, and the arguments that are made of them for a function."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from grpo_core.rewards.contract import Reward
from grpo_core.rewards.trl_arguments import UNKNOWN_PLAN, CallLog, TrainerState

if TYPE_CHECKING:
    from grpo_core.data.images import ImageFiles

SHOWN = 200  # characters of a prompt or completion in a message
PICTURED = ("prompts", "images", "image")  # arguments that show images
BY_ROW = ("rows", "completions", "completion_ids", "environments")  # fields of a batch that have an entry per row


@dataclass(frozen=True)
class Batch:
    """B completions with their prompts and columns, row by row."""

    rows: Sequence[Mapping[str, Any]]  # dataset rows, "prompt" among their columns
    completions: Sequence[Any]  # texts, or conversations for conversational prompts
    completion_ids: Sequence[list[int]]
    environments: Sequence[Any] = ()  # of conversations with tools or an environment
    state: TrainerState = UNKNOWN_PLAN  # when they are scored
    images: ImageFiles | None = None  # of the rows, which have their numbers

    def only(self, i: int) -> Batch:
        return self._at([i])

    def scored_by(self, reward: Reward) -> Batch:
        """The rows whose source the reward is for."""
        places = [i for i, row in enumerate(self.rows) if reward.scores(row)]
        return self if len(places) == len(self.rows) else self._at(places)

    def _at(self, places: Sequence[int]) -> Batch:
        chosen = {name: [values[i] for i in places] for name in BY_ROW if (values := getattr(self, name))}
        return replace(self, **chosen)

    def read_by(self, reward: Reward) -> Batch:
        """The part of the batch that the reward, and messages about it, need: what is sent to its process."""
        if reward.accepts is None:
            return replace(self, environments=())
        columns = {"prompt", *reward.accepts, *(["images"] if self.images else [])}
        rows = [{key: value for key, value in row.items() if key in columns} for row in self.rows]
        ids = self.completion_ids if "completion_ids" in columns else [[] for _ in rows]
        return Batch(rows, self.completions, ids, state=self.state, images=self.images)

    def arguments(self, reward: Reward, log: CallLog) -> dict[str, Any]:
        """The function's arguments, which it may change: rows, completions and args are copies."""
        copied = {
            **{key: [row[key] for row in self.rows] for key in self.rows[0] if key != "prompt"},
            "prompts": [row["prompt"] for row in self.rows],
            "completions": self.completions,
        }
        given = {
            "completion_ids": [list(ids) for ids in self.completion_ids],
            **({"environments": list(self.environments)} if self.environments else {}),
            **({"trainer_state": self.state} if reward.reads_state else {}),
            "log_extra": log.log_extra,
            "log_metric": log.log_metric,
            **copy.deepcopy(dict(reward.args)),
        }
        accepts = {*copied, *given} if reward.accepts is None else reward.accepts
        own = {
            key: [value if isinstance(value, str) else copy.deepcopy(value) for value in values]
            for key, values in copied.items()
            if key in accepts
        }
        if self.images and {*PICTURED} & {*accepts}:
            given |= self._pictured(self.images)
        return own | {key: value for key, value in given.items() if key in accepts}

    def _pictured(self, files: ImageFiles) -> dict[str, list[Any]]:
        """What shows images, as TRL gives it to rewards; rows share them. `image`: a row's first, None if it has
        none."""
        from grpo_core.data.images import open_image, with_pictures

        numbers = [*dict.fromkeys(number for row in self.rows for number in row["images"])]
        opened = dict(zip(numbers, map(open_image, files.read(numbers)), strict=True))
        images = [[opened[number] for number in row["images"]] for row in self.rows]
        pairs = zip(self.rows, images, strict=True)
        prompts = [with_pictures(row["prompt"], own) if own else copy.deepcopy(row["prompt"]) for row, own in pairs]
        return {"prompts": prompts, "images": images, "image": [next(iter(own), None) for own in images]}

    def shown(self, i: int) -> str:
        from grpo_core.data.images import in_words

        return f"prompt {short(in_words(self.rows[i]['prompt']))}, completion {short(self.completions[i])}"


def joined(batches: Sequence[Batch]) -> Batch:
    """One batch of all rows, in this order."""
    columns = {name: [entry for batch in batches for entry in getattr(batch, name)] for name in BY_ROW}
    first = batches[0] if batches else Batch([], [], [])
    return Batch(**columns, state=first.state, images=first.images)


def ended_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Tokens of each text as a completion, with the end token."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] + end for text in texts]


def short(value: Any) -> str:
    """A value as Python writes it, with its middle left out if it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}"
