"""vLLM for real, on the CPU in float32: after every weight update it samples from the trainer's policy."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import config_values, make_model, make_run

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow

# A size at which vLLM packs its linear layers, so that the packed copy of a tied head goes stale on a reload.
PACKED = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}


def _python(*arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_the_engine_follows_the_trainer_through_every_update(tmp_path: Path, tied: bool) -> None:
    model = make_model(tmp_path / "model", tie_word_embeddings=tied, initializer_range=0.1, **PACKED)
    values = config_values(model, tmp_path, max_steps=5)
    values["rewards"] = [{"function": "tests.grpo_core.test_trainer:parity"}]
    values["rollout"]["engine"] = "vllm"
    run = make_run(tmp_path / "run", values)
    _python("-m", "grpo_core.train", str(run))
    steps = [json.loads(line) for line in (run / "training" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 5
    assert [step["sampling/sampling_logp_difference/max"] < 1e-4 for step in steps] == [True] * 5
    assert all(step["grad_norm"] > 0 for step in steps)


PROMPTS = ["1+1=", "12+34=", "7"]


def sample(run: str, other: str, result: str) -> None:
    """Run in a process of its own: what one engine says to several calls, before and after it takes other weights."""
    from grpo_core.config import load_config
    from grpo_core.policy import load_model, load_tokenizer
    from grpo_core.rollout.engine import Request, Sampling, make_engine

    config = load_config(Path(run) / "config.toml")
    model, tokenizer = load_model(config.model.name_or_path), load_tokenizer(config.model)
    engine = make_engine(config, config.model.name_or_path, model, tokenizer, max_length=20)
    requests = [Request(tokenizer(prompt)["input_ids"], 6, seed=1000 * i) for i, prompt in enumerate(PROMPTS)]
    singles = [Request(r.prompt_ids, 1, r.seed + i) for r in requests for i in range(r.num_completions)]
    reseeded = [Request(r.prompt_ids, r.num_completions, r.seed + 500) for r in requests]
    free = Sampling(6, temperature=0.7)
    drawn = {
        "first": engine.generate(requests, free),
        "again": engine.generate(requests, free),
        "singles": engine.generate(singles, free),
        "reseeded": engine.generate(reseeded, free),
        "truncated": engine.generate(requests, Sampling(6, temperature=0.7, top_k=3)),
        "greedy": engine.generate(singles, Sampling(6)),
    }
    engine.sync_weights(load_model(other))
    drawn["synced"] = engine.generate(requests, free)
    engine.close()
    Path(result).write_text(json.dumps({name: [asdict(c) for c in completions] for name, completions in drawn.items()}))


def test_samples_depend_on_the_seed_alone_and_carry_the_models_log_probabilities(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = make_model(tmp_path / "model", initializer_range=0.2)
    other = make_model(tmp_path / "other", initializer_range=0.3)
    values = config_values(folder, tmp_path)
    values["rollout"]["engine"] = "vllm"
    run, result = make_run(tmp_path / "run", values), tmp_path / "drawn.json"
    call = f"from tests.grpo_core.test_vllm import sample; sample({str(run)!r}, {str(other)!r}, {str(result)!r})"
    _python("-c", call)
    drawn: dict[str, list[dict[str, Any]]] = json.loads(result.read_text())
    ids = {name: [completion["ids"] for completion in completions] for name, completions in drawn.items()}
    assert ids["again"] == ids["singles"] == ids["first"]
    assert ids["reseeded"] != ids["first"] != ids["synced"]
    assert len({tuple(completion) for completion in ids["first"][:6]}) > 1

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS for _ in range(6)]
    for name, completions in drawn.items():
        model = AutoModelForCausalLM.from_pretrained(other if name == "synced" else folder).eval()
        for prompt, completion in zip(prompts, completions, strict=True):
            tokens = completion["ids"]
            with torch.no_grad():
                logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            assert completion["truncated"] == (tokens[-1] != tokenizer.eos_token_id)
            assert len(tokens) == 6 or not completion["truncated"]
            if name == "greedy":
                assert tokens == logits.argmax(-1).tolist()
                continue
            logits = logits / 0.7
            if name == "truncated":
                logits[logits < logits.topk(3).values[:, -1:]] = -torch.inf
            expected = logits.log_softmax(-1)[range(len(tokens)), tokens]
            assert completion["logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)
