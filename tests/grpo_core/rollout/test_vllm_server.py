"""A training over a vLLM server, for real, on the CPU. What a server can suffer: tests/e2e/test_vllm_server.py.

The model is one whose layers vLLM packs and whose head is tied: the kind that goes stale when a reload goes wrong.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from grpo_core.rollout.types import Request, Sampling
from tests.conftest import config_values, make_model, make_run
from tests.grpo_core.rollout.sampling import sampled
from tests.grpo_core.rollout.vllm_engine import (
    PACKED,
    can_be_drawn,
    cut,
    hold,
    logprob_when_drawn,
    plain_distributions,
    start,
)
from tests.grpo_core.training.killing import in_child, train
from tests.serving import free_ports, policy_server

pytestmark = pytest.mark.served


@pytest.mark.e2e
def test_a_server_samples_from_the_trainers_policy_after_every_update(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", tie_word_embeddings=True, initializer_range=0.1, **PACKED)
    (port,) = free_ports(1)
    values = config_values(model, tmp_path, engine="vllm-server", max_steps=3, vllm_server_timeout=600.0)
    values["rollout"] |= {"temperature": 0.8, "top_p": 0.9, "top_k": 500, "min_p": 0.002}
    values["rewards"] = [{"function": "tests.grpo_core.training.test_loop:parity"}]
    values["rollout"]["vllm_server_base_urls"] = [f"http://127.0.0.1:{port}"]
    run = make_run(tmp_path / "run", values)
    with policy_server(run / "config.toml", port, tmp_path / "server.log"):
        ended = train(run)  # waits until the server is up
        assert _statuses(f"http://127.0.0.1:{port}") == {"program": 200, "page": 403, "foreign name": 403}
    assert ended == 0, (tmp_path / "server.log").read_text()
    steps = [json.loads(line) for line in (run / "training" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    assert all(step["sampling/sync_drift"] < 1e-5 for step in steps)
    assert all(step["sampling/sampling_logp_difference/max"] < 1e-4 for step in steps)
    assert all(step["sampling/importance_sampling_ratio/min"] > 0.999 for step in steps)
    assert all(step["grad_norm"] > 0 for step in steps)


@pytest.mark.e2e
def test_conversations_over_a_server_have_the_tokens_of_each_alone_and_keep_what_was_computed(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", initializer_range=0.2, max_position_embeddings=512)
    (port,) = free_ports(1)
    values = config_values(model, tmp_path, engine="vllm-server", vllm_server_timeout=600.0)
    values["rollout"]["vllm_server_base_urls"] = [url := f"http://127.0.0.1:{port}"]
    run = make_run(tmp_path / "run", values)

    def converse() -> None:
        engine, model, _ = start(run)
        together, before = hold(engine, 12), _cached_tokens(url)
        alone, after = hold(engine, 1), _cached_tokens(url)
        engine.sync_weights(model)
        conversation = hold(engine, 1, 1)  # of one turn
        engine.close()
        assert [[turn.ids for turn in turns] for turns in together] == [[turn.ids for turn in turns] for turns in alone]
        assert conversation[0][0].ids == alone[0][0].ids
        turns = [len(turns) for turns in alone]
        assert before == 128 * (sum(turns) - len(turns)), "of each turn but the first"
        assert after - before == 128 * sum(turns)
        assert _cached_tokens(url) == after, "nothing that the weights before a sync computed"

    with policy_server(run / "config.toml", port, tmp_path / "server.log"):
        assert in_child(converse) == 0, (tmp_path / "server.log").read_text()


@pytest.mark.e2e
@pytest.mark.parametrize("guesses", [False, True])
def test_a_server_penalises_repetitions_and_stops_at_texts_as_the_other_engines_do(
    tmp_path: Path, guesses: bool
) -> None:
    model = make_model(tmp_path / "model", initializer_range=0.2, max_position_embeddings=512)
    (port,) = free_ports(1)
    values = config_values(model, tmp_path, engine="vllm-server", vllm_server_timeout=600.0)
    values["rollout"]["vllm_server_base_urls"] = [f"http://127.0.0.1:{port}"]
    free = Sampling(8, temperature=0.9, top_k=9, top_p=0.9, min_p=0.05, repetition_penalty=1.6)
    if guesses:
        ngrams = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        values["rollout"]["vllm_args"] = {"speculative_config": ngrams}
        free = replace(free, min_p=0.0)
    run = make_run(tmp_path / "run", values)

    def sample() -> None:
        engine, model, tokenizer = start(run)
        requests = [Request(tokenizer(prompt)["input_ids"], 8, seed) for seed, prompt in ((5, "1+1="), (500, "12+3"))]
        prompts = [request.prompt_ids for request in requests for _ in range(8)]
        drawn = sampled(engine.generate(requests, free))
        for prompt, completion in zip(prompts, drawn, strict=True):
            found = plain_distributions(model, prompt + completion.ids, 0.9, 1.6)[len(prompt) - 1 :]
            for token, logprob, of in zip(completion.ids, completion.logprobs, found.tolist(), strict=True):
                assert logprob == pytest.approx(logprob_when_drawn(token, of, free), abs=1e-4)
                assert token in can_be_drawn(of, free)
        stopped = sampled(engine.generate(requests, replace(free, stop=("3", "12"))))
        engine.close()
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        ends = cut(drawn, ("3", "12"), prompts, decode)
        assert [each.ids for each in stopped] == [each.ids for each in ends] != [each.ids for each in drawn]
        assert guesses or stopped == ends

    with policy_server(run / "config.toml", port, tmp_path / "server.log"):
        assert in_child(sample) == 0, (tmp_path / "server.log").read_text()


def _cached_tokens(url: str) -> float:
    """Tokens of prompts that the server has had from its prefix cache so far."""
    figures = httpx2.get(f"{url}/metrics", timeout=60).text
    return sum(float(value) for value in re.findall(r"^vllm:prefix_cache_hits_total\S* (\S+)", figures, re.MULTILINE))


def _statuses(url: str) -> dict[str, int]:
    """What a server answers that is asked to run a method: by a program, by a web page, under a foreign name."""
    headers = {"program": {}, "page": {"Origin": "http://localhost:1"}, "foreign name": {"Host": "evil.example"}}
    body = {"method": "release_lease", "args": ["nobody"]}
    return {
        asker: httpx2.post(f"{url}/collective_rpc", json=body, headers=sent, timeout=60).status_code
        for asker, sent in headers.items()
    }


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 32}


@pytest.mark.parametrize(("architecture", "changes"), [("Qwen2", {}), ("Qwen3Moe", EXPERTS)])
def test_the_weights_sent_are_those_of_the_adapted_model_under_the_bases_names(
    architecture: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    import torch

    from grpo_core.config.inputs import ModelConfig
    from grpo_core.model.loading import copy_of_whole_weights, load_model, with_adapter

    model_folder = make_model(tmp_path, architecture, **changes)
    config = ModelConfig(name_or_path=str(model_folder), use_peft=True, lora_r=3, lora_alpha=12)
    base = load_model(model_folder)
    adapted = with_adapter(load_model(model_folder), config)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    before = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    weights = copy_of_whole_weights(adapted)
    ids = torch.tensor([[3, 4, 5, 6]])
    assert not torch.allclose(base(ids).logits, adapted(ids).logits, atol=1e-2)
    base.load_state_dict(weights)  # which wants every name
    assert torch.allclose(base(ids).logits, adapted(ids).logits, atol=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapted.state_dict().items())


def test_a_tied_head_is_among_the_weights_sent_and_its_memory_is_copied_once(tmp_path: Path) -> None:
    import torch

    from grpo_core.model.loading import copy_of_whole_weights, load_model

    model = load_model(make_model(tmp_path / "model", tie_word_embeddings=True))
    weights = copy_of_whole_weights(model)
    head, embedding = weights["lm_head.weight"], weights["model.embed_tokens.weight"]
    assert head.data_ptr() == embedding.data_ptr() != model.get_input_embeddings().weight.data_ptr()
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    assert head.abs().sum() > 0
