"""Whether a served model answers as in its evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx2

from flows.serving.model_server import Version, precision_here
from grpo_core.config.evaluation import HELD_OUT
from grpo_core.config.files import parse_config
from grpo_core.data.chat import is_conversation, without_gaps
from grpo_core.errors import GrpoError
from grpo_core.rollout.requests import own_limit
from tasks.registry.judging import Recorded

PROMPTS = 100
# Difference of the two highest log-probabilities within which rounding may choose either token, by precision.
ROUNDING = {"bf16": 0.25, "no": 1e-3}


@dataclass(frozen=True)
class Answers:
    """Number of compared prompts, of equal answers, and of ties: answers that differ first where two tokens are equally
    likely, except for rounding. `differing`: row, served answer and evaluated answer of the others."""

    compared: int
    equal: int
    ties: int
    differing: list[tuple[int, str, str]]


def check_served(url: str, key: str, version: Version, recorded: Recorded) -> Answers:
    """Ask for held-out prompts of the version's evaluation. Raises GrpoError if its answers are not greedy ones to
    single prompts, or if the server refuses a request."""
    config = parse_config(recorded.config)
    if config.evaluation.temperature > 0 or config.environment.is_used:
        raise GrpoError(
            "--check compares with the evaluation's answers, and those of this version are sampled at a temperature, "
            "or in conversations with an environment; evaluate it with evaluation.temperature = 0"
        )
    samples = recorded.samples.filter(set=HELD_OUT, sample=0).sort("row").head(PROMPTS)
    equal, ties, differing = 0, 0, list[tuple[int, str, str]]()
    with httpx2.Client(
        base_url=url, headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=None, trust_env=False
    ) as client:
        for row in samples.iter_rows(named=True):
            limit = min(own_limit(config, row) or config.evaluation_length, config.evaluation_length)
            text, tokens = _ask(client, version.name, row["prompt"], limit)
            wanted = row["trained/completion"]
            if text == wanted:
                equal += 1
            elif _is_tie(tokens, wanted, ROUNDING[precision_here(version)]):
                ties += 1
            else:
                differing.append((row["row"], text, wanted))
    return Answers(samples.height, equal, ties, differing)


Tokens = list[tuple[str, float]]  # text of each, and by how much it is more likely than the second


def _ask(client: httpx2.Client, name: str, prompt: Any, limit: int) -> tuple[str, Tokens]:
    """The greedy answer to a prompt, of at most so many tokens, and its tokens."""
    body: dict[str, Any] = {"model": name, "temperature": 0, "max_tokens": limit}
    if is_conversation(prompt):
        path, body = (
            "/v1/chat/completions",
            body | {"messages": without_gaps(prompt), "logprobs": True, "top_logprobs": 2},
        )
    else:
        path, body = "/v1/completions", body | {"prompt": prompt, "logprobs": 2}
    answer = client.post(path, json=body)
    if not answer.is_success:
        raise GrpoError(f"the server refuses a held-out prompt with status {answer.status_code}: {answer.text}")
    [choice] = answer.json()["choices"]
    if is_conversation(prompt):
        listed = [
            (each["token"], [it["logprob"] for it in each["top_logprobs"]]) for each in choice["logprobs"]["content"]
        ]
        return choice["message"]["content"], [(token, _gap(top)) for token, top in listed]
    found = choice["logprobs"]
    return choice["text"], [
        (it, _gap([*top.values()])) for it, top in zip(found["tokens"], found["top_logprobs"], strict=True)
    ]


def _gap(logprobs: list[float]) -> float:
    highest, *rest = sorted(logprobs, reverse=True)
    return highest - max(rest, default=float("-inf"))


def _is_tie(tokens: Tokens, wanted: str, rounding: float) -> bool:
    """True if the first token that departs from the wanted text is hardly more likely than the second."""
    text = ""
    for token, gap in tokens:
        text += token
        if not wanted.startswith(text):
            return gap < rounding
    return bool(tokens) and tokens[-1][1] < rounding  # the text went on
