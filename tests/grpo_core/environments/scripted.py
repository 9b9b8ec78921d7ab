"""A policy that says what a test wants, and how it is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import Qwen2Config

from grpo_core.environments.turns import TurnFormat
from grpo_core.rollout.types import Completion, Request, Sampling, Stream, token_limit
from tests.grpo_core.environments.templates import CHATML, make_tokenizer

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>\n"
    "{\"name\": \"{{ call['function']['name'] }}\", \"arguments\": {{ call['function']['arguments'] | tojson }}}"
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def call(name: str, arguments: str = "{}") -> str:
    """A turn that calls a tool."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def turns(tokenizer: Any = None) -> TurnFormat:
    """ChatML with tools."""
    return TurnFormat(tokenizer or make_tokenizer(TEMPLATE, CHATML, "<|im_end|>"), ("<|im_end|>",), {})


def save_model(folder: Path, template: str = TEMPLATE) -> Path:
    """A model's folder with all that is read of a model before it is trained."""
    make_tokenizer(template, CHATML, "<|im_end|>").save_pretrained(folder)
    Qwen2Config(max_position_embeddings=512).save_pretrained(folder)
    return folder


class Scripted:
    """An engine that says what each conversation's script says, turn by turn; the user's first words name it: "#3"."""

    def __init__(
        self,
        scripts: Sequence[Sequence[str]],
        format: TurnFormat,
        score: Callable[[list[int]], list[float]] | None = None,
    ):
        """`score`: log-probability of each token except the first; default: -0.5."""
        self.scripts, self.format = scripts, format
        self.score = score or (lambda ids: [-0.5] * (len(ids) - 1))

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Stream:
        count, more = 0, requests
        while more:
            finished = []
            for number, request in enumerate(more, count):
                before = self.format.tokenizer.decode(request.prompt_ids)
                which, turn = int(re.findall(r"#(\d+)", before)[0]), before.count("<|im_start|>assistant") - 1
                ids = self.format.tokenizer(self.scripts[which][turn] + self.format.ends[0])["input_ids"]
                kept = ids[: token_limit(request, sampling)]
                logprobs = self.score(request.prompt_ids + kept)[-len(kept) :]
                finished.append((number, [Completion(kept, logprobs, truncated=len(kept) < len(ids))]))
            count += len(more)
            more = (yield finished) or ()
