"""Stop texts, as in vLLM: a completion ends with the token that completes one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor

from grpo_core.errors import ConfigError
from grpo_core.model.to_device import move
from grpo_core.rollout.types import Request

RESET = "Invalid prefix encountered"  # tokenizers' error where bytes make no characters; vLLM begins a new stream too


class StopTexts:
    """Stop texts, and the last characters of each completion that is being sampled."""

    def __init__(self, tokenizer: Any, texts: Sequence[str]):
        if not tokenizer.is_fast:
            raise ConfigError(
                f"rollout.stop={[*texts]} needs a tokenizer with a tokenizer.json, and {tokenizer.name_or_path!r} has "
                "none; remove it, or set rollout.engine to 'vllm'"
            )
        self.tokenizer, self.texts = tokenizer.backend_tokenizer, texts
        self.kept = max(map(len, texts)) - 1  # last characters, in which a text may begin
        self.streams: dict[tuple[int, int], DecodeStream] = {}
        self.ends: dict[tuple[int, int], str] = {}

    def begin(self, requests: dict[int, Request]) -> None:
        for number, request in requests.items():
            for i in range(request.num_completions):
                # After the prompt, whose last bytes may be one character together with the first of the completion.
                self.streams[number, i] = DecodeStream(ids=request.prompt_ids, skip_special_tokens=True)
                self.ends[number, i] = ""

    def completed(self, places: Tensor, tokens: Tensor, going: Tensor) -> Tensor:
        """Return which completions these tokens end with a text. `places`: (B, 2) request and completion; tokens of
        rows that are not `going` are not read. (B,), (B,) bool → (B,) bool"""
        # One tensor, which is waited for once.
        read = torch.cat([places, tokens[:, None], going[:, None]], dim=1).tolist()
        found = [bool(is_going) and self._completes((number, i), token) for number, i, token, is_going in read]
        return move([torch.tensor(found)], going.device)[0]

    def _completes(self, place: tuple[int, int], token: int) -> bool:
        written = self.ends[place] + self._next(place, token)
        self.ends[place] = written[max(len(written) - self.kept, 0) :]
        return any(text in written for text in self.texts)

    def _next(self, place: tuple[int, int], token: int) -> str:
        try:
            return self.streams[place].step(self.tokenizer, token) or ""
        except Exception as error:  # the only class of errors that it raises
            if not str(error).startswith(RESET):
                raise
            self.streams[place] = DecodeStream(skip_special_tokens=True)
            return self.streams[place].step(self.tokenizer, token) or ""
