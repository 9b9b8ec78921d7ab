"""Speculation by n-grams in vLLM on a CPU: CPU time per token with and without it, on prompts that the completion
repeats and on prompts that it does not.

    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.speculation

The model has the size of a small one, and its weights are set so that the next token follows from the last one: tokens
of the first half run in circles of 32, those of the second half in one circle of 1,024.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PAIRS, REQUESTS, PROMPT, COMPLETION = 5, 32, 64, 128
VOCABULARY, WIDTH, CIRCLE = 2048, 256, 32
NGRAMS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 2}


def follower(token: int) -> int:
    """The token after this one."""
    half = VOCABULARY // 2
    if token < half:
        return token // CIRCLE * CIRCLE + (token + 1) % CIRCLE
    return half + (token + 1) % half


def write_model(folder: Path) -> None:
    """Save a model of which each block adds nothing, so that its head sees the last token alone."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 1024, "num_hidden_layers": 6}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, max_position_embeddings=512, **shape, **heads))
    embedding = torch.nn.functional.normalize(torch.randn(VOCABULARY, WIDTH), dim=-1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight[[follower(token) for token in range(VOCABULARY)]] = 4 * embedding
    model.save_pretrained(folder)


def prompts(repeat: bool) -> list[dict[str, list[int]]]:
    first, found = 0 if repeat else VOCABULARY // 2, []
    for number in range(REQUESTS):
        ids = [first + CIRCLE * number]
        while len(ids) < PROMPT:
            ids.append(follower(ids[-1]))
        found.append({"prompt_token_ids": ids})
    return found


def measure(folder: Path, speculates: bool) -> dict[str, list[float]]:
    """CPU seconds of each call, by prompt set; the first call, which compiles, is left out."""
    from vllm import LLM, SamplingParams

    from grpo_core.rollout.vllm.speculation import repair_expansion

    repair_expansion()
    options: dict[str, Any] = {"speculative_config": NGRAMS} if speculates else {}
    options |= {"dtype": "float32", "enforce_eager": True, "enable_chunked_prefill": False, "max_model_len": 256}
    options |= {"skip_tokenizer_init": True, "logprobs_mode": "processed_logprobs"}
    llm: Any = LLM(model=str(folder), **options)
    asked = SamplingParams(temperature=1.0, seed=1, max_tokens=COMPLETION, logprobs=0, detokenize=False)
    found: dict[str, list[float]] = {}
    for name, given in {"repeated": prompts(True), "not repeated": prompts(False)}.items():
        found[name] = []
        for _ in range(PAIRS + 1):
            begun = time.process_time()
            outputs = llm.generate(given, asked, use_tqdm=False)
            found[name].append(time.process_time() - begun)
            assert sum(len(each.outputs[0].token_ids) for each in outputs) == REQUESTS * COMPLETION
    return {name: seconds[1:] for name, seconds in found.items()}


def main() -> None:
    if len(sys.argv) == 3:
        print(json.dumps(measure(Path(sys.argv[1]), sys.argv[2] == "ngram")))
        return
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        found = {}
        for arm in ("plain", "ngram"):
            command = [sys.executable, "-m", "benchmarks.speculation", folder, arm]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[arm] = json.loads(done.stdout.splitlines()[-1])
    for name in found["plain"]:
        seconds = {arm: statistics.median(of_arm[name]) for arm, of_arm in found.items()}
        per_token = {arm: f"{1e6 * each / REQUESTS / COMPLETION:.0f} us" for arm, each in seconds.items()}
        print(f"prompt {name}: {per_token} per token, {seconds['plain'] / seconds['ngram']:.2f} times as fast")


if __name__ == "__main__":
    main()
