"""Speculation by n-grams with vLLM for real, on the CPU in float32: the same distribution in fewer steps."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from grpo_core.config.files import load_config
from grpo_core.rollout.types import Request, Sampling
from tests import forked
from tests.conftest import config_values, make_model, make_run
from tests.grpo_core.rollout.sampling import sampled
from tests.grpo_core.rollout.vllm_engine import (
    can_be_drawn,
    cut,
    hold,
    logprob_when_drawn,
    plain_distributions,
    plain_logprobs,
    sequences,
    start,
)

pytestmark = [pytest.mark.served, pytest.mark.e2e]

NGRAMS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
ARGS = {
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "disable_custom_all_reduce": True,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 64,
    "speculative_config": NGRAMS,
}
FREE = Sampling(40, temperature=0.7)
SAMPLINGS = {
    "greedy": Sampling(40),
    "free": FREE,
    "top_p": Sampling(40, temperature=1.3, top_p=0.6),
    "penalty": Sampling(40, temperature=0.7, repetition_penalty=1.5),
    "all": Sampling(40, temperature=0.9, top_k=9, top_p=0.9, repetition_penalty=0.8),
}
STOP = ("3", "12")


def repeating(groups: int, size: int) -> list[Request]:
    """Prompts that repeat themselves, so that there are n-grams to find."""
    draw = random.Random(0)
    prompts = [[draw.randrange(3, 13) for _ in range(5)] * 6 for _ in range(groups)]
    return [Request(prompt, size, seed=1000 * number) for number, prompt in enumerate(prompts)]


def one_by_one(requests: list[Request]) -> list[Request]:
    return [Request(r.prompt_ids, 1, r.seed + i) for r in requests for i in range(r.num_completions)]


def sample(run: Path) -> dict[str, Any]:
    """What one engine says to several calls, and how many steps the greedy one took."""
    engine, _, _ = start(run)
    requests, steps = repeating(8, 3), engine.llm.llm_engine.step
    with mock.patch.object(engine.llm.llm_engine, "step", side_effect=steps) as counted:
        found: dict[str, Any] = {"greedy": sampled(engine.generate(one_by_one(requests), SAMPLINGS["greedy"]))}
    found["free"] = sampled(engine.generate(requests, FREE))
    if not load_config(run / "config.toml").rollout.speculation:
        return {**found, "steps": counted.call_count}
    others = {name: how for name, how in SAMPLINGS.items() if name not in found}
    found |= {name: sampled(engine.generate(requests, how)) for name, how in others.items()}
    found["alone"] = [each for one in one_by_one(requests)[:4] for each in sampled(engine.generate([one], FREE))]
    found["stopped"] = sampled(engine.generate(requests, replace(FREE, stop=STOP)))
    found["many"] = sampled(engine.generate(repeating(20, 16), replace(FREE, max_tokens=16)))
    found |= {"conversations": hold(engine, 12), "turn by turn": hold(engine, 1)}
    return {**found, "steps": counted.call_count, "scores": engine.compute_logprobs(sequences())}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """The model's folder, and what is drawn without speculation and with it."""
    tmp_path = tmp_path_factory.mktemp("ngrams")
    folder = make_model(tmp_path / "model", initializer_range=0.2, max_position_embeddings=512)
    runs = []
    for name, args in {"plain": {}, "guessed": ARGS}.items():
        values = config_values(folder, tmp_path, engine="vllm")
        values["rollout"]["vllm_args"] = args
        runs.append(make_run(tmp_path / name, values))
    plain, guessed = (forked.call(sample, run) for run in runs)
    return folder, plain, guessed


def test_speculation_draws_from_the_same_distribution_and_says_the_models_log_probabilities(
    drawn: tuple[Path, dict[str, Any], dict[str, Any]],
) -> None:
    from transformers import AutoModelForCausalLM

    folder, plain, guessed = drawn
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = {name: [each.ids for each in guessed[name]] for name in [*SAMPLINGS, "alone"]}
    assert ids["greedy"] == [each.ids for each in plain["greedy"]]
    assert guessed["steps"] < 0.8 * plain["steps"]
    assert ids["free"][:4] == ids["alone"]
    assert ids["free"] != [each.ids for each in plain["free"]]
    for name, sampling in SAMPLINGS.items():
        for asked, completion in zip(one_by_one(repeating(8, 3)), guessed[name], strict=True):
            rows = _distributions(model, asked, completion.ids, sampling)
            left = Sampling(40) if name == "greedy" else sampling
            for token, logprob, row in zip(completion.ids, completion.logprobs, rows.tolist(), strict=True):
                assert logprob == pytest.approx(logprob_when_drawn(token, row, left), abs=1e-4)
                assert token in can_be_drawn(row, sampling)
    for score, asked in zip(guessed["scores"], sequences(), strict=True):
        assert score == pytest.approx(plain_logprobs(model, asked), abs=1e-4)

    # Sums over tokens of what has expectation 0 given the tokens before, in standard deviations.
    likeliest, surprise, variances = 0.0, 0.0, [0.0, 0.0]
    for asked, completion in zip(one_by_one(repeating(20, 16)), guessed["many"], strict=True):
        rows = _distributions(model, asked, completion.ids, FREE)
        for token, row in zip(completion.ids, rows, strict=True):
            p = row.exp()
            mean, top = float((p * row).sum()), float(p.max())
            likeliest += float(token == int(p.argmax())) - top
            surprise += float(row[token]) - mean
            variances[0] += top * (1 - top)
            variances[1] += float((p * row**2).sum()) - mean**2
    assert sum(len(each.ids) for each in guessed["many"]) > 2000
    assert abs(likeliest) < 3 * math.sqrt(variances[0])
    assert abs(surprise) < 3 * math.sqrt(variances[1])


def test_speculation_ends_completions_and_turns_where_they_end_without_it(
    drawn: tuple[Path, dict[str, Any], dict[str, Any]],
) -> None:
    from transformers import AutoTokenizer

    folder, _, guessed = drawn
    decode = partial(AutoTokenizer.from_pretrained(folder).decode, skip_special_tokens=True)
    prompts = [asked.prompt_ids for asked in one_by_one(repeating(8, 3))]
    expected = cut(guessed["free"], STOP, prompts, decode)
    for found, wanted in zip(guessed["stopped"], expected, strict=True):
        assert (found.ids, len(found.logprobs)) == (wanted.ids, len(wanted.ids))
    assert [[turn.ids for turn in turns] for turns in guessed["conversations"]] == [
        [turn.ids for turn in turns] for turns in guessed["turn by turn"]
    ]


def _distributions(model: Any, asked: Request, ids: list[int], sampling: Sampling) -> Any:
    """Log-probabilities of each of these tokens' places. (T, V)"""
    of_all = plain_distributions(
        model, asked.prompt_ids + ids, sampling.temperature or 1.0, sampling.repetition_penalty
    )
    return of_all[len(asked.prompt_ids) - 1 :]
