"""Completions that are decoded together, one row each: what has been drawn for them, and which go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from grpo_core.rollout.sampling import draw, uniforms
from grpo_core.rollout.types import Completion, Request, Sampling


@dataclass
class Rows:
    """B completions of up to T tokens. A finished one that is still decoded overwrites its place after its last token,
    hence one place more."""

    places: Tensor  # (B, 2) int64: the request's number, and the completion's number in it
    limits: Tensor  # (B,) int64, tokens
    points: Tensor  # (B, T + 1) the uniforms that tokens are drawn with
    tokens: Tensor  # (B, T + 1) int64
    logprobs: Tensor  # (B, T + 1)
    lengths: Tensor  # (B,) int64, tokens drawn so far
    ended: Tensor  # (B,) bool, by an end token
    going: Tensor  # (B,) bool, neither ended nor at the limit


def begin(requests: Mapping[int, Request], sampling: Sampling, device: torch.device) -> Rows:
    """Rows of requests, by their numbers, before the first token."""
    limits, places = [], []
    for number, request in requests.items():
        limits += [limit(request, sampling)] * request.num_completions
        places += [(number, i) for i in range(request.num_completions)]
    points = uniforms([*requests.values()], max(limits) + 1).to(device)
    ended = torch.zeros(len(limits), dtype=torch.bool, device=device)
    return Rows(
        torch.tensor(places, device=device),
        torch.tensor(limits, device=device),
        points,
        torch.zeros(points.shape, dtype=torch.int64, device=device),
        torch.zeros_like(points),
        torch.zeros(len(limits), dtype=torch.int64, device=device),
        ended,
        ~ended,
    )


def limit(request: Request, sampling: Sampling) -> int:
    """Tokens of each of the request's completions at most."""
    return sampling.max_tokens if request.max_tokens is None else request.max_tokens


def advance(rows: Rows, logits: Tensor, sampling: Sampling, end_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Draw the next token of each row, in place. Returns the tokens, and which rows they finish: (B,), (B,) bool."""
    at = rows.lengths[:, None]
    token, logprob = draw(logits, rows.points.gather(1, at).squeeze(1), sampling)
    rows.tokens.scatter_(1, at, token[:, None])
    rows.logprobs.scatter_(1, at, logprob[:, None])
    rows.lengths += rows.going
    rows.ended |= rows.going & torch.isin(token, end_ids)
    before, rows.going = rows.going, rows.going & ~rows.ended & (rows.lengths < rows.limits)
    return token, before & ~rows.going


def select(rows: Rows, which: Tensor) -> Rows:
    """These rows alone. (B,) bool"""
    return Rows(*(column[which] for column in _columns(rows)))


def join(rows: Rows, others: Rows) -> Rows:
    """The others behind these."""
    columns = []
    for mine, theirs in zip(_columns(rows), _columns(others), strict=True):
        if mine.dim() == 2:
            width = max(mine.shape[1], theirs.shape[1])
            mine, theirs = (nn.functional.pad(x, (0, width - x.shape[1])) for x in (mine, theirs))
        columns.append(torch.cat([mine, theirs]))
    return Rows(*columns)


def completions(rows: Rows) -> list[tuple[int, int, Completion]]:
    """What has been drawn: the request's number, the completion's number in it, the completion."""
    columns = (rows.places, rows.tokens, rows.logprobs, rows.lengths, rows.ended)
    return [
        (number, i, Completion(ids[:n], logprobs[:n], truncated=not ended))
        for (number, i), ids, logprobs, n, ended in zip(*(column.tolist() for column in columns), strict=True)
    ]


def _columns(rows: Rows) -> list[Tensor]:
    return [getattr(rows, field.name) for field in fields(rows)]
