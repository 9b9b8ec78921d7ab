"""Completions that are decoded together, one row each: what has been drawn for them, which are unfinished, and which a
stop text ends: as in vLLM, with the token that completes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor, nn

from grpo_core.errors import ConfigError
from grpo_core.rollout.sampling import draw, penalise, uniforms
from grpo_core.rollout.types import Completion, Request, Sampling, token_limit
from grpo_core.system.to_device import move

RESET = "Invalid prefix encountered"  # tokenizers' error where bytes make no characters; vLLM begins a new stream too


@dataclass
class Rows:
    """B completions of up to T tokens. A finished row may be decoded further; those tokens go into the place after its
    last one, hence T + 1 places."""

    places: Tensor  # (B, 2) int64: the request's number, and the completion's number in it
    limits: Tensor  # (B,) int64, tokens
    points: Tensor  # (B, T + 1) the uniforms that tokens are drawn with
    tokens: Tensor  # (B, T + 1) int64
    logprobs: Tensor  # (B, T + 1)
    lengths: Tensor  # (B,) int64, tokens drawn so far
    ended: Tensor  # (B,) bool, by an end token
    going: Tensor  # (B,) bool, neither ended nor at the limit
    seen: Tensor  # (B, V) bool, tokens of prompt and completion so far; (B, 0) without a repetition penalty
    routes: Tensor  # (B, (T + 1) · F) int16, F experts of each token, see routing.choices; (B, 0) if they are not kept


def begin_rows(requests: Mapping[int, Request], sampling: Sampling, logits: Tensor, chosen: Tensor | None) -> Rows:
    """Make the rows of numbered requests before their first token, whose logits these are. (B, V). `chosen`: experts of
    tokens of their prompts, if they are kept. (…, F)"""
    device = logits.device
    limits, places = [], []
    for number, request in requests.items():
        limits += [token_limit(request, sampling)] * request.num_completions
        places += [(number, i) for i in range(request.num_completions)]
    points = uniforms([*requests.values()], max(limits) + 1).to(device)
    ended = torch.zeros(len(limits), dtype=torch.bool, device=device)
    seen = torch.zeros(len(limits), logits.shape[1] * (sampling.repetition_penalty != 1), dtype=torch.bool)
    if sampling.repetition_penalty != 1:
        for row, (number, _) in enumerate(places):
            seen[row, _text(requests[number])] = True
    return Rows(
        torch.tensor(places, device=device),
        torch.tensor(limits, device=device),
        points,
        torch.zeros(points.shape, dtype=torch.int64, device=device),
        torch.zeros_like(points),
        torch.zeros(len(limits), dtype=torch.int64, device=device),
        ended,
        ~ended,
        seen.to(device),
        logits.new_zeros(len(limits), 0 if chosen is None else points.shape[1] * chosen.shape[1], dtype=torch.int16),
    )


def _text(request: Request) -> list[int]:
    """The prompt's tokens of text, without those of images."""
    return [token for token in request.prompt_ids if token >= 0]


def advance(
    rows: Rows, logits: Tensor, sampling: Sampling, end_ids: Tensor, stops: StopTexts | None
) -> tuple[Tensor, Tensor]:
    """Draw the next token of each row, in place. Returns the tokens, and which rows they finish. (B,), (B,) bool"""
    at = rows.lengths[:, None]
    if sampling.repetition_penalty != 1:
        logits = penalise(logits, rows.seen, sampling.repetition_penalty)
    token, logprob = draw(logits, rows.points.gather(1, at).squeeze(1), sampling)
    if sampling.repetition_penalty != 1:
        rows.seen.scatter_(1, token[:, None], True)
    rows.tokens.scatter_(1, at, token[:, None])
    rows.logprobs.scatter_(1, at, logprob[:, None])
    rows.lengths += rows.going
    rows.ended |= rows.going & torch.isin(token, end_ids)
    if stops:
        rows.ended |= stops.completed(rows.places, token, rows.going & ~rows.ended)
    before, rows.going = rows.going, rows.going & ~rows.ended & (rows.lengths < rows.limits)
    return token, before & ~rows.going


def note_routes(rows: Rows, chosen: Tensor) -> None:
    """Keep the experts that were chosen for each row's last token, in place. Rows that have ended only write where
    nothing is read. (B, F)"""
    width = chosen.shape[1]
    at = (rows.lengths[:, None] - 1) * width + torch.arange(width, device=chosen.device)
    rows.routes.scatter_(1, at, chosen)


def select(rows: Rows, which: Tensor) -> Rows:
    """Return only these rows. (B,) bool"""
    return Rows(*(column[which] for column in _columns(rows)))


def join(rows: Rows, others: Rows) -> Rows:
    """Return the rows with the others appended."""
    columns = []
    for mine, theirs in zip(_columns(rows), _columns(others), strict=True):
        if mine.dim() == 2:
            width = max(mine.shape[1], theirs.shape[1])
            mine, theirs = (nn.functional.pad(x, (0, width - x.shape[1])) for x in (mine, theirs))
        columns.append(torch.cat([mine, theirs]))
    return Rows(*columns)


def completions(rows: Rows, prompt_routes: Mapping[int, np.ndarray]) -> list[tuple[int, int, Completion]]:
    """Return what has been drawn: per row the request's number, the completion's number in it, and the completion.
    `prompt_routes`: (P, F) by request; empty if they are not kept."""
    columns = (rows.places, rows.tokens, rows.logprobs, rows.lengths, rows.ended)
    found = zip(*(column.tolist() for column in columns), rows.routes.cpu().numpy(), strict=True)
    return [
        (number, i, Completion(ids[:n], logprobs[:n], not ended, routes=_joined(prompt_routes.get(number), own, n)))
        for (number, i), ids, logprobs, n, ended, own in found
    ]


def _joined(before: np.ndarray | None, own: np.ndarray, n: int) -> np.ndarray | None:
    """A prompt's experts, then those of a completion of n tokens; None if they are not kept."""
    return None if before is None else np.concatenate([before, own.reshape(-1, before.shape[1])[:n]])


def _columns(rows: Rows) -> list[Tensor]:
    return [getattr(rows, field.name) for field in fields(rows)]


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
                self.streams[number, i] = DecodeStream(ids=_text(request), skip_special_tokens=True)
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
