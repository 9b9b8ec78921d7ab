"""Measures how far a sampler's log-probabilities are from the trainer's, over every token that it samples: in float32,
in bfloat16 with logits rounded to it, and in bfloat16 with float32 logits, as trainings have them.

    python -m benchmarks.engine_gap [--tiny] [--model FOLDER] [--engines transformers vllm]

The default model has 5.8 million random parameters, scaled so that its logits have a standard deviation of 3. Each
measurement is a process of its own, on a GPU if there is one. Fails if float32 differs by more than rounding.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import GENERATE, tiny
from benchmarks.command import ROOT, parse
from benchmarks.vs_trl import environment
from benchmarks.workload import write

BOUND = 1e-4  # in float32
SPREAD = 3.0  # standard deviation of the random model's logits
PROMPTS, GROUP = 16, 4
KINDS = {"float32": ("no", False), "bf16, rounded logits": ("bf16", True), "bf16": ("bf16", False)}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.engine_gap", description="Distance of the samplers' log-probabilities from the trainer's."
    )
    parser.add_argument("--model", type=Path, help="folder of a model; default: a random one")
    known = ["transformers", *(["vllm"] if importlib.util.find_spec("vllm") else [])]
    parser.add_argument("--engines", nargs="+", choices=("transformers", "vllm"), default=known)
    parser.add_argument("--tokens", type=int, default=64, help="of each of the 64 completions; default 64")
    options = parse(parser)
    tokens = 8 if options.tiny else options.tokens
    worst = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or _random_model(Path(scratch), cut=options.tiny)
        print("engine        computed in             mean   largest   k3")
        for engine in options.engines:
            for kind, (precision, rounds) in KINDS.items():
                settings = {"engine": engine, "precision": precision, "rounds": rounds, "model": str(folder)}
                found = _in_a_process(settings | {"tokens": tokens})
                mean, largest, k3 = found["mean"], found["max"], found["k3"]
                print(f"{engine:12}  {kind:20}  {mean:7.1e}  {largest:7.1e}  {k3:7.1e}", flush=True)
                worst = max(worst, largest if precision == "no" else 0.0)
    if worst > BOUND:
        raise SystemExit(f"in float32 an engine is {worst:.1e} from the trainer, and {BOUND:g} is allowed")


def _random_model(folder: Path, *, cut: bool) -> Path:
    from transformers import AutoModelForCausalLM

    write(tiny(GENERATE) if cut else GENERATE, folder / "workload")
    found = folder / "workload" / "model"
    model = AutoModelForCausalLM.from_pretrained(found)
    with torch.no_grad():
        spread = model(torch.arange(2, 66)[None]).logits.std()
        model.model.norm.weight *= SPREAD / spread
    model.save_pretrained(found)
    return found


def _in_a_process(settings: dict[str, Any]) -> dict[str, float]:
    command = [sys.executable, "-c", f"from benchmarks.engine_gap import measure; measure({json.dumps(settings)!r})"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{settings} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@torch.no_grad()
def measure(settings_json: str) -> None:
    """Print, as JSON, mean and largest |trainer's − sampler's log-probability|, and the mean of exp(r) − 1 − r, where r
    is that difference."""
    from grpo_core.config.files import parse_config
    from grpo_core.data.prompts import load_tokenizer
    from grpo_core.model.loading import load_model
    from grpo_core.model.policy import Policy
    from grpo_core.model.sequences import Sequences, pad
    from grpo_core.rollout.factory import make_engine
    from grpo_core.rollout.types import Request, Sampling

    settings = json.loads(settings_json)
    tokens = settings["tokens"]
    if settings["rounds"]:
        _round_logits()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if settings["precision"] == "bf16" else torch.float32
    config = parse_config(
        {
            "name": "gap",
            "model": {"name_or_path": settings["model"]},
            "data": {"train": "none", "eval": "none"},
            "rewards": [{"function": "length", "args": {"target": 1}}],
            "rollout": {"engine": settings["engine"], "num_generations": GROUP, "max_completion_length": tokens},
            "train": {"mixed_precision": settings["precision"], "per_device_train_batch_size": GROUP, "max_steps": 1},
        }
    )
    tokenizer, model = load_tokenizer(config.model), load_model(settings["model"], dtype=dtype, device=device)
    prompts = [tokenizer(f"{n} things to know before you go to")["input_ids"] for n in range(3, 3 + PROMPTS)]
    longest = max(map(len, prompts)) + tokens + 1
    engine = make_engine(config, settings["model"], model, tokenizer, longest)
    stream = engine.generate([Request(ids, GROUP, 100 * n) for n, ids in enumerate(prompts)], Sampling(tokens, 1.0))
    groups = dict(finished for step in stream for finished in step)
    rows = [(n, prompts[n], one) for n in range(PROMPTS) for one in groups[n]]
    lengths = [(len(prompt), len(one.ids), n) for n, prompt, one in rows]
    ids = pad([prompt + one.ids for _, prompt, one in rows], torch.int64)
    policy = Policy(model, 1.0, max_length=longest)
    found, _ = policy(policy.prepare(Sequences(ids, *(torch.tensor(each) for each in zip(*lengths, strict=True)))))
    pairs = zip(found.cpu(), (torch.tensor(one.logprobs) for *_, one in rows), strict=True)
    r = torch.cat([mine[: len(own)] - own for mine, own in pairs])
    figures = {"mean": r.abs().mean(), "max": r.abs().max(), "k3": (r.exp() - 1 - r).mean()}
    print(json.dumps({name: float(value) for name, value in figures.items()}))


def _round_logits() -> None:
    """Make trainer and samplers round their logits to the model's dtype."""
    from grpo_core.model import float32_logits, logprobs
    from grpo_core.rollout.vllm.logprobs import HEAD

    def rounded(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (hidden @ weight.T).float()

    float32_logits.Float32Logits.forward = torch.nn.Linear.forward  # type: ignore[assignment]
    logprobs.float32_product = rounded
    if torch.cuda.is_available():
        from grpo_core.model import fused_logprobs

        fused_logprobs.float32_product = rounded
    HEAD["head_dtype"] = "model"


if __name__ == "__main__":
    main()
