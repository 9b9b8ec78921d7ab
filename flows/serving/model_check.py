"""Whether a served model answers as in its evaluation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import httpx2

from flows.serving.model_server import Version, precision_here
from grpo_core import run_files
from grpo_core.config.evaluation import HELD_OUT
from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.data.chat import is_conversation, without_gaps
from grpo_core.errors import GrpoError
from grpo_core.planning.hardware import find_gpu
from grpo_core.rollout.requests import own_limit
from grpo_core.system.tables import read_parquet
from tasks.registry.agreement import EXACT, ROUNDED, Agreement, Asked, Steps, compare, with_reward_change
from tasks.registry.judging import Recorded
from tasks.stages.run_directory import run_folder

PROMPTS = 100
Tokens = Sequence[str]
Tops = Sequence[Sequence[float]]


def check_served(url: str, key: str, version: Version, recorded: Recorded) -> Agreement:
    """Ask for held-out prompts of the version's evaluation. Raises GrpoError if its answers are not greedy ones to
    single prompts, or if the server refuses a request."""
    config = parse_config(recorded.config)
    if config.evaluation.temperature > 0 or config.environment.is_used:
        raise GrpoError(
            "--check compares with the evaluation's answers, and those of this version are sampled at a temperature, "
            "or in conversations with an environment; evaluate it with evaluation.temperature = 0"
        )

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    rounding = EXACT if precision_here(version) == "no" and find_gpu() is None else ROUNDED
    with httpx2.Client(base_url=url, headers=headers, timeout=None, trust_env=False) as client:
        found, others = compare(_ask(client, config, version.name, recorded, rounding))
    run = run_folder(config.name)
    samples = run / run_files.EVALUATION / run_files.SAMPLES
    is_there = samples.exists() and read_parquet(samples).equals(recorded.samples)
    return with_reward_change(found, others, run) if is_there else found


def _ask(client: httpx2.Client, config: RunConfig, name: str, recorded: Recorded, rounding: float) -> Iterator[Asked]:
    samples = recorded.samples.filter(set=HELD_OUT, sample=0).sort("row").head(PROMPTS)
    for row in samples.iter_rows(named=True):
        limit = min(own_limit(config, row) or config.evaluation_length, config.evaluation_length)
        served, tokens, tops = _answer(client, name, row["prompt"], limit)
        yield Asked(row["row"], served, row["trained/completion"], partial(_steps, served, tokens, tops, rounding))


def _answer(client: httpx2.Client, name: str, prompt: Any, limit: int) -> tuple[str, Tokens, Tops]:
    """The greedy answer to a prompt, of at most so many tokens; and these, if the server tells them."""
    body: dict[str, Any] = {"model": name, "temperature": 0, "max_tokens": limit}
    if is_conversation(prompt):
        path, body = "chat/completions", body | {"messages": without_gaps(prompt), "logprobs": True, "top_logprobs": 2}
    else:
        path, body = "completions", body | {"prompt": prompt, "logprobs": 2}
    answer = client.post(f"/v1/{path}", json=body)
    if not answer.is_success:
        raise GrpoError(f"the server refuses a held-out prompt with status {answer.status_code}: {answer.text}")
    [choice] = answer.json()["choices"]
    found = choice["logprobs"] or {"content": [], "tokens": [], "top_logprobs": []}
    if is_conversation(prompt):
        tops = [[it["logprob"] for it in each["top_logprobs"]] for each in found["content"]]
        return choice["message"]["content"], [each["token"] for each in found["content"]], tops
    return choice["text"], found["tokens"], [[*top.values()] for top in found["top_logprobs"]]


def _steps(answer: str, tokens: Tokens, tops: Tops, rounding: float) -> Steps:
    """The answer, token by token, without a stop text. `tops`: the highest log-probabilities at each."""
    ties = [highest - second < rounding for highest, second, *_ in (sorted([*top, -math.inf])[::-1] for top in tops)]
    return [(text[: len(answer)], is_tie) for text, is_tie in zip(itertools.accumulate(tokens), ties, strict=True)]
