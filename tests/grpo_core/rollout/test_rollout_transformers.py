"""The transformers engine: its log-probabilities are the model's, its samples depend on their seed alone."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, RwkvConfig, RwkvForCausalLM

from examples import tiny
from grpo_core.config.inputs import ModelConfig
from grpo_core.errors import EngineError
from grpo_core.model.loading import with_adapter
from grpo_core.model.precision import make_bfloat16
from grpo_core.rollout import group_cache
from grpo_core.rollout import transformers_engine as engine_module
from grpo_core.rollout.rows import StopTexts
from grpo_core.rollout.sampling import draw, penalise
from grpo_core.rollout.transformers_engine import TransformersEngine
from grpo_core.rollout.types import Request, Sampling
from tests.conftest import make_model
from tests.grpo_core.rollout.sampling import sampled
from tests.grpo_core.rollout.vllm_engine import (
    can_be_drawn,
    cut,
    logprob_when_drawn,
    plain_distributions,
    plain_logprobs,
)

PROMPTS = ["1+1=", "12+34=", "7", "99+99+1="]
BYTES = tiny.make_tokenizer([])


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture(scope="module")
def model(model_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()


def _requests(tokenizer: Any, n: int = 3, seed: int = 5) -> list[Request]:
    return [Request(tokenizer(prompt)["input_ids"], n, seed + 100 * i) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def absolute(tokenizer: Any) -> Any:
    """A model with learned positions, which notices padding that shifts them."""
    torch.manual_seed(0)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    sizes = {"vocab_size": len(tokenizer), "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(initializer_range=0.3, **sizes, **ids)).eval()


@torch.no_grad()
@pytest.mark.parametrize("tokens", [6, 64, 100, 200])
def test_a_cache_has_no_more_places_than_its_completions_may_have_tokens(model: Any, tokens: int) -> None:
    """Until others join, whose places begin later."""
    cache = group_cache.GroupCache(model, [[3, 4]], [2], max_tokens=tokens)
    cache.prefill()
    for _ in range(tokens):
        cache.decode(torch.tensor([3, 4]))
        assert cache.capacity <= tokens and cache.layers[0].keys.shape[2] == cache.capacity
    cache.decode(torch.tensor([3, 4]))
    assert cache.capacity > tokens


@pytest.mark.parametrize(
    "sampling",
    [
        *(Sampling(8, 1.0), Sampling(8, 0.7), Sampling(8, 1.0, top_k=3)),
        *(Sampling(8, 0.7, top_p=0.6), Sampling(8, 1.5, top_p=0.8, top_k=5), Sampling(8, 1.5, min_p=0.4)),
        *(Sampling(8, 1.2, repetition_penalty=1.7), Sampling(8, 0.0, repetition_penalty=0.5)),
        Sampling(8, 0.8, top_k=9, top_p=0.9, min_p=0.02, repetition_penalty=1.3),
    ],
)
@pytest.mark.parametrize("name", ["model", "absolute"])
def test_log_probabilities_are_those_of_a_plain_forward_pass(
    name: str, request: pytest.FixtureRequest, tokenizer: Any, sampling: Sampling
) -> None:
    """They are over the tokens that can be drawn, after the repetition penalty."""
    model = request.getfixturevalue(name)
    requests = _requests(tokenizer)
    completions = sampled(TransformersEngine(model, tokenizer).generate(requests, sampling))
    prompts = [request.prompt_ids for request in requests for _ in range(request.num_completions)]
    assert len(completions) == len(prompts)
    for prompt, completion in zip(prompts, completions, strict=True):
        ids, first = prompt + completion.ids, len(prompt) - 1
        found = plain_distributions(model, ids, sampling.temperature or 1.0, sampling.repetition_penalty)[first:]
        for token, logprob, distribution in zip(completion.ids, completion.logprobs, found.tolist(), strict=True):
            assert logprob == pytest.approx(logprob_when_drawn(token, distribution, sampling), abs=1e-5)
            assert token in can_be_drawn(distribution, sampling if sampling.temperature else replace(sampling, top_k=1))


ARCHITECTURES = {
    "Qwen2": (True, {}),
    "Qwen3": (True, {"head_dim": 16}),
    "Llama": (True, {"num_attention_heads": 4}),
    "Mistral": (False, {"sliding_window": 4}),
    "Gemma2": (False, {"head_dim": 32, "sliding_window": 4, "attn_logit_softcapping": 2.0}),
    "Gemma": (True, {"head_dim": 32}),
    "Lfm2": (False, {"layer_types": ["conv", "full_attention"]}),
    "Qwen3_5Text": (
        False,
        {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kind_of_attention_has_the_log_probabilities_of_a_plain_pass(
    architecture: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of all sizes, whose members leave one by one; completions that outgrow the first buffers."""
    monkeypatch.setattr(group_cache, "FIRST_CAPACITY", 2)
    shared, changes = ARCHITECTURES[architecture]
    folder = make_model(tmp_path, architecture=architecture, **changes)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = TransformersEngine(model, tokenizer)
    assert engine.shares_cache == shared
    requests = [Request(tokenizer(prompt)["input_ids"], 1 + 7 * i, 100 * i) for i, prompt in enumerate(PROMPTS)]
    completions = sampled(engine.generate(requests, Sampling(20, 1.0)))
    prompts = [request.prompt_ids for request in requests for _ in range(request.num_completions)]
    assert len({len(completion.ids) for completion in completions}) > 4
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = plain_logprobs(model, prompt + completion.ids)[len(prompt) - 1 :]
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


SEQUENCES = [list(range(3, 13)) * 4, [5, 6], [7], list(range(12, 2, -1))]


@pytest.mark.parametrize("name", ["model", "absolute"])
def test_scores_are_those_of_a_plain_forward_pass(name: str, request: pytest.FixtureRequest, tokenizer: Any) -> None:
    model = request.getfixturevalue(name)
    for ids, scores in zip(SEQUENCES, TransformersEngine(model, tokenizer).compute_logprobs(SEQUENCES), strict=True):
        assert scores == pytest.approx(plain_logprobs(model, ids), abs=1e-5)


def test_scores_follow_the_weights_that_were_synced(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    other = AutoModelForCausalLM.from_pretrained(make_model(tmp_path, initializer_range=0.3)).eval()
    engine = TransformersEngine(model, tokenizer)
    assert engine.compute_logprobs(SEQUENCES[:1])[0] == pytest.approx(plain_logprobs(model, SEQUENCES[0]), abs=1e-5)
    engine.sync_weights(other)
    assert engine.compute_logprobs(SEQUENCES[:1])[0] == pytest.approx(plain_logprobs(other, SEQUENCES[0]), abs=1e-5)


def test_scores_have_the_precision_of_the_samples(model: Any, tokenizer: Any) -> None:
    ids = SEQUENCES[0]
    half = make_bfloat16(copy.deepcopy(model))
    expected = plain_logprobs(half, ids)
    assert expected != pytest.approx(plain_logprobs(model, ids), abs=1e-3)
    assert TransformersEngine(half, tokenizer).compute_logprobs([ids])[0] == pytest.approx(expected, abs=1e-5)


def test_no_requests_give_no_completions(model: Any, tokenizer: Any) -> None:
    assert sampled(TransformersEngine(model, tokenizer).generate([], Sampling(8, 1.0))) == []


def test_a_model_under_an_adapter_samples_from_what_it_is_with_the_adapter(model_folder: Path, tokenizer: Any) -> None:
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    requests, sampling = _requests(tokenizer), Sampling(8, 1.0)
    before = sampled(TransformersEngine(base, tokenizer).generate(requests, sampling))
    adapted = with_adapter(base, ModelConfig(name_or_path=str(model_folder), use_peft=True, lora_r=4))
    engine = TransformersEngine(adapted, tokenizer)
    assert engine.shares_cache
    # Not to the bit: torch multiplies by a frozen matrix in another order.
    for fresh, plain in zip(sampled(engine.generate(requests, sampling)), before, strict=True):
        assert fresh.ids == plain.ids
        assert fresh.logprobs == pytest.approx(plain.logprobs, abs=1e-5)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    engine.sync_weights(adapted)
    completions = sampled(engine.generate(requests, sampling))
    assert [c.ids for c in completions] != [c.ids for c in before]
    assert any(not completion.truncated for completion in completions)
    for request, completion in zip(requests, completions[::3], strict=True):
        expected = plain_logprobs(adapted, request.prompt_ids + completion.ids)[len(request.prompt_ids) - 1 :]
        assert completion.logprobs == pytest.approx(expected, abs=1e-5)


def test_a_completion_depends_on_its_seed_and_not_on_its_company(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sampling = TransformersEngine(model, tokenizer), Sampling(8, 1.0)
    requests = _requests(tokenizer)
    together = [c.ids for c in sampled(engine.generate(requests, sampling))]
    alone = [c.ids for request in requests for c in sampled(engine.generate([request], sampling))]
    assert alone == together
    monkeypatch.setattr(engine_module, "MAX_ROWS", 4)
    assert [c.ids for c in sampled(engine.generate(requests, sampling))] == together
    singles = [Request(r.prompt_ids, 1, r.seed + i) for r in requests for i in range(r.num_completions)]
    assert [c.ids for c in sampled(engine.generate(singles, sampling))] == together
    assert [c.ids for c in sampled(engine.generate(_requests(tokenizer, seed=6), sampling))] != together


JOINING = {
    "tied": ("Qwen2", {"tie_word_embeddings": True}),
    "Qwen3": ("Qwen3", {"head_dim": 16, "num_key_value_heads": 2}),
    "experts": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16}),
    "window": ("Mistral", {"sliding_window": 4}),
    "layers with and without a window": ("Gemma2", {"head_dim": 32, "sliding_window": 4}),
    "states": ("Qwen3_5Text", ARCHITECTURES["Qwen3_5Text"][1]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        pytest.param(name, rows, marks=[pytest.mark.e2e] * (name not in ("Qwen3", "experts", "window", "states")))
        for name, rows in zip(JOINING, [512, 7, 512, 7, 512, 7], strict=True)
    ],
)
def test_requests_that_join_at_any_step_get_the_tokens_that_they_get_alone(
    name: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Prompts and limits of all lengths; groups, some with one prompt; a stream that is longer than each of them."""
    architecture, changes = JOINING[name]
    folder = make_model(tmp_path, architecture, **changes)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine, sampling, draw = TransformersEngine(model, tokenizer), Sampling(24, 1.2), random.Random(rows)
    assert engine.shares_cache == ("window" not in name and name != "states")
    prompts = [[draw.randrange(3, 13) for _ in range(draw.randrange(1, 30))] for _ in range(8)]
    requests = [
        Request(draw.choice(prompts), draw.randrange(1, 5), 100 * i, draw.choice([None, draw.randrange(1, 25)]))
        for i in range(12)
    ]
    alone = [sampled(engine.generate([request], sampling)) for request in requests]
    assert any(not completion.truncated for completions in alone for completion in completions)
    monkeypatch.setattr(engine_module, "MAX_ROWS", rows)
    monkeypatch.setattr(engine_module, "JOIN_STEPS", draw.randrange(1, 4))
    monkeypatch.setattr(group_cache, "FIRST_CAPACITY", 2)
    steps = engine.generate(requests[:2], sampling)
    sent, found = 2, dict(next(steps))
    while sent < len(requests):
        count = draw.choice([0, 0, 0, 0, 1, 2])
        finished = dict(steps.send(requests[sent : sent + count] or None))
        sent += count
        assert not found.keys() & finished.keys()
        found |= finished
    found |= dict(entry for finished in steps for entry in finished)
    assert sorted(found) == list(range(len(alone)))
    for number, completions in enumerate(alone):
        for one, other in zip(found[number], completions, strict=True):
            assert (one.ids, one.truncated) == (other.ids, other.truncated)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_the_end_token_ends_a_completion_and_the_limit_truncates_one(model: Any, tokenizer: Any) -> None:
    completions = sampled(TransformersEngine(model, tokenizer).generate(_requests(tokenizer, n=40), Sampling(6, 1.0)))
    assert {completion.truncated for completion in completions} == {True, False}
    for completion in completions:
        assert len(completion.ids) == len(completion.logprobs) <= 6
        assert tokenizer.eos_token_id not in completion.ids[:-1]
        assert completion.truncated == (completion.ids[-1] != tokenizer.eos_token_id)
        assert not completion.truncated or len(completion.ids) == 6


@pytest.mark.parametrize("named", [5, [5, 6], None])
def test_the_generation_configs_end_tokens_and_the_tokenizers_end_a_completion(
    model_folder: Path, tokenizer: Any, named: int | list[int] | None
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    model.generation_config.eos_token_id = named
    ends = {tokenizer.eos_token_id, *([] if named is None else [named] if isinstance(named, int) else named)}
    completions = sampled(TransformersEngine(model, tokenizer).generate(_requests(tokenizer, n=100), Sampling(8, 1.0)))
    assert {completion.ids[-1] for completion in completions if not completion.truncated} == ends
    assert not any(ends & set(completion.ids[:-1]) for completion in completions)


def test_each_completion_is_truncated_if_there_is_no_end_token(model: Any, model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.eos_token = tokenizer.pad_token = None
    model = copy.deepcopy(model)
    model.generation_config.eos_token_id = None
    engine = TransformersEngine(model, tokenizer)
    completions = sampled(engine.generate(_requests(tokenizer), Sampling(4, 1.0)))
    assert {(len(completion.ids), completion.truncated) for completion in completions} == {(4, True)}
    assert engine.compute_logprobs([[3, 4, 5], [6, 7]])[1] == pytest.approx(plain_logprobs(model, [6, 7]), abs=1e-5)


def test_a_model_whose_state_is_in_no_cache_is_refused(tokenizer: Any) -> None:
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "attention_hidden_size": 16, "vocab_size": len(tokenizer)}
    with pytest.raises(EngineError, match="RwkvForCausalLM does not give a padded prompt, with a cache, the log"):
        TransformersEngine(RwkvForCausalLM(RwkvConfig(**shape)).eval(), tokenizer)


def test_a_request_is_handed_out_with_the_step_that_finishes_it(model: Any, tokenizer: Any) -> None:
    steps = list(TransformersEngine(model, tokenizer).generate(_requests(tokenizer, n=2), Sampling(60, 1.0)))
    longest = {
        step: max(len(completion.ids) for completion in completions)
        for step, finished in enumerate(steps, start=1)
        for _, completions in finished
    }
    assert len(longest) > 1
    assert all(step == length for step, length in longest.items())


def test_greedy_is_what_generate_does(model: Any, tokenizer: Any) -> None:
    requests = _requests(tokenizer, n=1)
    completions = sampled(TransformersEngine(model, tokenizer).generate(requests, Sampling(8)))
    for request, completion in zip(requests, completions, strict=True):
        prompt = torch.tensor([request.prompt_ids])
        expected = model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
        assert completion.ids == expected.tolist()


def test_first_tokens_are_drawn_with_the_models_probabilities(model: Any, tokenizer: Any) -> None:
    prompt, n = tokenizer("1+1=")["input_ids"], 4000
    drawn = sampled(TransformersEngine(model, tokenizer).generate([Request(prompt, n, seed=0)], Sampling(1, 1.0)))
    counts = Counter(completion.ids[0] for completion in drawn)
    with torch.no_grad():
        probabilities = model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
    deviations = [
        abs(counts[token] / n - p) / (p * (1 - p) / n) ** 0.5 for token, p in enumerate(probabilities.tolist())
    ]
    assert max(deviations) < 4.5


@given(
    logits=st.lists(st.floats(-6, 6, width=32), min_size=1, max_size=12),
    seen=st.sets(st.integers(0, 11)),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.3, 0.7, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    penalty=st.sampled_from([0.5, 1.0, 1.3, 4.0]),
)
def test_every_combination_of_options_draws_what_a_plain_reference_does(
    logits: list[float], seen: set[int], temperature: float, top_k: int, top_p: float, min_p: float, penalty: float
) -> None:
    """With uniforms on a grid, each token comes up as often as its share of what is left says."""
    seen &= {*range(len(logits))}
    penalised = [x if i not in seen else x / penalty if x > 0 else x * penalty for i, x in enumerate(logits)]
    total = math.fsum(math.exp(x / temperature) for x in penalised)
    logprobs = [x / temperature - math.log(total) for x in penalised]
    p = sorted((math.exp(each) for each in logprobs), reverse=True)
    assume(all(abs(each / p[0] - min_p) > 1e-4 for each in p[1:]))  # where rounding decides, either is right
    assume(all(a - b > 1e-6 for a, b in itertools.pairwise(p)))
    kept = [each for each in p if each >= min_p * p[0]][: top_k or None]
    assume(top_p == 1 or all(abs(sum(kept[:n]) / sum(kept) - top_p) > 1e-4 for n in range(len(kept) + 1)))
    sampling = Sampling(1, temperature, top_p, top_k, min_p, penalty)
    left = can_be_drawn(logprobs, sampling)
    share = math.fsum(math.exp(logprobs[token]) for token in left)

    n = 400
    rows = torch.tensor([logits]).expand(n, -1).contiguous()
    history = torch.tensor([[i in seen for i in range(len(logits))]]).expand(n, -1)
    token, logprob = draw(penalise(rows, history, penalty), (torch.arange(n) + 0.5) / n, sampling)
    counts = Counter(token.tolist())
    assert {*counts} <= left
    for each in left:
        assert abs(counts[each] - n * math.exp(logprobs[each]) / share) <= 1 + 1e-3
    assert logprob.tolist() == pytest.approx([logprobs[each] - math.log(share) for each in token.tolist()], abs=1e-5)


STOPS = [("7",), ("12", "3"), ("1+1=9", "5", "55"), ("=",)]


@pytest.mark.parametrize("texts", STOPS)
@pytest.mark.parametrize("shares_cache", [True, False])
def test_a_text_to_stop_at_ends_a_completion_with_its_last_token(
    model: Any, tokenizer: Any, texts: tuple[str, ...], shares_cache: bool
) -> None:
    """And leaves the others as they are; one that ends at the length limit is not cut off."""
    engine, requests = TransformersEngine(model, tokenizer), _requests(tokenizer, n=8)
    engine.shares_cache = shares_cache
    free = sampled(engine.generate(requests, Sampling(6, 1.0)))
    stopped = sampled(engine.generate(requests, Sampling(6, 1.0, stop=texts)))
    prompts = [request.prompt_ids for request in requests for _ in range(8)]
    assert stopped == cut(free, texts, prompts, partial(tokenizer.decode, skip_special_tokens=True))
    ends = [len(completion.ids) for completion in stopped if not completion.truncated]
    assert ends and (max(ends) == 6 or texts[0].startswith("1+1")) and stopped != free


@given(
    text=st.text(st.sampled_from("ab\né😀 ."), max_size=12),
    texts=st.lists(st.text(st.sampled_from("ab\né😀 ."), min_size=1, max_size=3), min_size=1, max_size=3),
    prompt=st.text(st.sampled_from("aé"), min_size=1, max_size=2),
)
def test_texts_to_stop_at_are_found_at_the_token_that_completes_them(text: str, texts: list[str], prompt: str) -> None:
    """Tokens are bytes here, of which a character may have several, and the first may belong to the prompt's last."""
    bytes_of = BYTES(prompt + text)["input_ids"]
    start = len(BYTES(prompt)["input_ids"])
    stops = StopTexts(BYTES, texts)
    stops.begin({3: Request(bytes_of[:start], 1, 0)})
    place, going = torch.tensor([[3, 0]]), torch.tensor([True])
    found = [bool(stops.completed(place, torch.tensor([token]), going)) for token in bytes_of[start:]]
    written = [BYTES.decode(bytes_of[start:n]) for n in range(start + 1, len(bytes_of) + 1)]
    first = next((n for n, so_far in enumerate(written) if any(each in so_far for each in texts)), None)
    assert (found.index(True) if True in found else None) == first
