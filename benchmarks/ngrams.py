"""Measures what n-gram speculation does to vLLM's sampling on this machine, with SmolLM2-135M-Instruct in float32.

    python -m examples.smollm.make && python -m benchmarks.ngrams

Each engine is a process of its own; they take turns, twice. Prints tokens per second and steps of three works: a text
that is copied from the prompt, sums, and sums whose tokens are drawn.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from grpo_core.rollout.types import Request, Sampling
from tests.conftest import config_values, make_run

BASE = Path("storage", "examples", "smollm", "base")
NGRAMS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 2}
TEXT = "The tower bridge was opened in {} by the mayor, who had paid {} coins for {} flags, {} drums and a grey horse."
TASKS = {
    "copies": ("Repeat this text exactly: " + TEXT, Sampling(32)),
    "answers, greedy": ("How much is {} + {}, and {} + {}? Explain each step.", Sampling(32)),
    "answers, drawn": ("How much is {} + {}, and {} + {}? Explain each step.", Sampling(32, temperature=1.0)),
}
ROUNDS = 2


def side(run: Path) -> None:
    """One engine: prints seconds, tokens and steps of each work as JSON."""
    from grpo_core.config.files import load_config
    from grpo_core.data.prompts import load_tokenizer
    from grpo_core.model.loading import load_model
    from grpo_core.rollout.loading import make_engine

    config = load_config(run / "config.toml")
    tokenizer = load_tokenizer(config.model)
    model = load_model(config.model.name_or_path)
    engine: Any = make_engine(config, config.model.name_or_path, model, tokenizer, 256)
    found: dict[str, Any] = {}
    for name, (text, sampling) in TASKS.items():
        prompts = [[{"role": "user", "content": text.format(11 + n, 23 + n, 37 + n, 58 + n)}] for n in range(8)]
        ids = [tokenizer.apply_chat_template(it, add_generation_prompt=True, tokenize=True) for it in prompts]
        ids = [it["input_ids"] if not isinstance(it, list) else it for it in ids]
        requests = [Request(list(prompt), 1, seed=100 * n) for n, prompt in enumerate(ids)]
        for turn in range(ROUNDS + 1):
            step = engine.llm.llm_engine.step
            with mock.patch.object(engine.llm.llm_engine, "step", side_effect=step) as counted:
                start = time.perf_counter()
                parts = [*engine.generate(requests, sampling)]
                tokens = sum(len(one.ids) for part in parts for _, completions in part for one in completions)
                seconds = time.perf_counter() - start
            if turn:
                found.setdefault(name, []).append([seconds, tokens, counted.call_count])
    engine.close()
    print("FOUND " + json.dumps(found), flush=True)


def main() -> None:
    figures: dict[str, dict[str, list[Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(2):
            sides = {"plain": {}, "n-grams": {"speculative_config": NGRAMS}}
            for name in sides if turn == 0 else reversed(sides):
                values = config_values(BASE, Path(scratch), engine="vllm")
                values["rollout"]["vllm_args"] = sides[name]
                run = make_run(Path(scratch, f"{name}-{turn}"), values)
                done = subprocess.run(
                    [sys.executable, "-m", "benchmarks.ngrams", str(run)], capture_output=True, text=True
                )
                lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
                if done.returncode or not lines:
                    raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
                for task, rows in json.loads(lines[0][6:]).items():
                    figures.setdefault(task, {}).setdefault(name, []).extend(rows)
    for task, of in figures.items():
        rates = {name: median(tokens / seconds for seconds, tokens, _ in rows) for name, rows in of.items()}
        steps = {name: median(steps for *_, steps in rows) for name, rows in of.items()}
        print(f"{task}: {rates}, steps {steps}, {rates['n-grams'] / rates['plain']:.2f}×", flush=True)


if __name__ == "__main__":
    side(Path(sys.argv[1])) if len(sys.argv) > 1 else main()
