"""Token ids of what a teacher reads in the place of each completion's prompt, by `teacher.template`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_core.config.run import RunConfig
from grpo_core.config.teacher import BETTER, ERROR
from grpo_core.data.chat import encode_prompts
from grpo_core.data.privileged import STAND_INS, shown_prompt
from grpo_core.data.prompts import Encoded, Row, rows_at
from grpo_core.environments.calls import ERROR as SAID
from grpo_core.environments.setting import Setting
from grpo_core.rewards.composition import weighted_sum
from grpo_core.rollout.collect import Sample

Shown = tuple[Any, Row, str]  # a prompt, the row that it is about, and what its environment's `reset` added


@dataclass(frozen=True)
class Privileged:
    """The template's configuration, and what makes token ids of prompts."""

    config: RunConfig
    encode: Callable[[Sequence[Shown]], list[list[int]]]
    max_length: int  # tokens of such a prompt and a completion: what the teacher reads at most


def load_privileged(
    config: RunConfig, rows: Sequence[Row], tokenizer: Any, setting: Setting | None
) -> Privileged | None:
    """What a teacher is shown in a training on these rows; None without a template. All are tokenized once, for the
    length of the longest."""
    if not (template := config.teacher.template or ""):
        return None

    def encode(shown: Sequence[Shown]) -> list[list[int]]:
        if setting is not None:
            return [setting.encode({**row, "prompt": prompt}, added or None) for prompt, row, added in shown]
        prompts = [prompt for prompt, *_ in shown]
        return encode_prompts(prompts, tokenizer, config.data.chat_template_kwargs) if prompts else []

    def encode_rows(rows: Sequence[Row]) -> list[list[int]]:
        shown = [(shown_prompt(template, row, STAND_INS), row, "") for row in rows]
        return encode([each for each in shown if each[0]])

    longest = max(map(len, Encoded(rows, encode_rows)), default=0)
    completions = 1 + config.teacher.shown_completions
    return Privileged(config, encode, longest + completions * config.rollout.max_completion_length)


def shown_prompts(privileged: Privileged, samples: Sequence[Sample], rows: Sequence[Row]) -> list[list[int] | None]:
    """Token ids that the teacher reads in the place of each sample's prompt; None where the template has nothing to
    show, or so much that prompt and completion are more than `max_length` tokens. `samples`: groups in a row."""
    template, shown = privileged.config.teacher.template or "", dict[int, Shown]()
    own, better = rows_at(rows, [sample.row for sample in samples]), _better(samples, privileged.config)
    for place, (sample, row, best) in enumerate(zip(samples, own, better, strict=True)):
        found = {BETTER: best, ERROR: _errors(sample)}
        if prompt := shown_prompt(template, row, found):
            shown[place] = prompt, row, sample.said.opening if sample.said else ""
    ids = dict(zip(shown, privileged.encode([*shown.values()]), strict=True))
    return [
        own if (own := ids.get(place)) and len(own) + len(sample.completion.ids) <= privileged.max_length else None
        for place, sample in enumerate(samples)
    ]


def _better(samples: Sequence[Sample], config: RunConfig) -> Iterator[str]:
    """Yield the text of the best other completion of each sample's group, the first of several; "" if its reward is not
    higher. Where no reward of the group's has a weight, each counts alike."""
    given = np.array([sample.rewards for sample in samples], dtype=np.float64)
    weighted = weighted_sum(given, config.rewards)
    alike = weighted_sum(given, [reward.model_copy(update={"weight": 1.0}) for reward in config.rewards])
    weights, g = np.array([reward.weight for reward in config.rewards]), config.rollout.num_generations
    for start in range(0, len(samples), g):
        place = slice(start, start + g)
        sums = weighted[place] if weights[~np.isnan(given[place]).all(axis=0)].any() else alike[place]
        best = int(np.nan_to_num(sums, nan=-np.inf).argmax())
        for own in sums:
            yield samples[start + best].text if sums[best] > own else ""


def _errors(sample: Sample) -> str:
    """The errors that tools have answered in a conversation, below each other."""
    messages = sample.said.messages if sample.said else []
    said = [message["content"] for message in messages if message["role"] == "tool"]
    return "\n".join(text for text in said if text.startswith(SAID))
