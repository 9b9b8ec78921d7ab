"""The transformers engine: decoding by captured graphs beside plain passes, what falls back, and its speed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.gpu.kernels import waits_of_host
from benchmarks.gpu.report import DEVICE, ON_GPU, TINY, Report, Row, at_most, distance, equals, real, small
from benchmarks.workload import _tokenizer
from grpo_core.rollout.group_cache import GroupCache
from grpo_core.rollout.transformers_engine import TransformersEngine
from grpo_core.rollout.types import Request, Sampling

STEPS = 200
JOINS, LEAVES = {5: 3, 90: 4}, (40, 70, 150)  # steps; a prompt's number joins, a quarter of the rows leaves
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 4e-2}
STOPPED = (16, 8, 256) if not TINY else (2, 2, 8)  # prompts, completions of each, their tokens
MOST_WAITS = 4  # per token step with stop texts: three, and some where rows begin and end
SIZES: dict[str, Any] = (
    {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if TINY
    else {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8}
) | {"num_key_value_heads": 2, "vocab_size": 997, "max_position_embeddings": 1024, "initializer_range": 0.05}


def decoding(scratch: Path, report: Report) -> None:
    """Decode 200 steps, past the ends of blocks, with joins and leaves, and compare with plain passes over each row."""
    for dtype, bound in BOUNDS.items():
        model = _model("Qwen2", dtype)
        worst, captured = _worst_of_steps(model)
        at_most(report, f"{dtype}: logits of {STEPS} steps from plain passes", worst, bound)
        if ON_GPU:
            equals(report, f"{dtype}: steps by a captured graph", captured, STEPS)


@torch.no_grad()
def _worst_of_steps(model: Any) -> tuple[float, int]:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(997, (n,), generator=generator).tolist() for n in (3, 40, 17, 25, 9)]
    copies = [4, 4, 2, 4, 3]
    rows = [[*ids] for ids, count in zip(prompts[:3], copies[:3], strict=True) for _ in range(count)]
    cache = GroupCache(model, prompts[:3], copies[:3], STEPS, captures=ON_GPU)
    logits, worst, captured = cache.prefill(), 0.0, 0
    for step in range(STEPS):
        if (number := JOINS.get(step)) is not None:
            new = GroupCache(model, [prompts[number]], [copies[number]], STEPS, captures=ON_GPU)
            first = new.prefill()
            cache.join(new)
            logits = torch.cat([logits, first])
            rows += [[*prompts[number]] for _ in range(copies[number])]
        if step in LEAVES:
            going = torch.rand(len(rows), generator=generator) > 0.25
            going[:2] = True
            cache.keep(going.to(DEVICE))
            logits = logits[going.to(DEVICE)]
            rows = [row for row, goes in zip(rows, going.tolist(), strict=True) if goes]
        if step % 9 == 0 or step % 64 in (0, 1, 63) or step in JOINS or step in LEAVES:
            worst = max(worst, distance([logits], [_plain_logits(model, rows)]))
        token = torch.multinomial(logits.float().softmax(-1).cpu(), 1, generator=generator)[:, 0]
        for row, one in zip(rows, token.tolist(), strict=True):
            row.append(one)
        logits = cache.decode(token.to(DEVICE)).clone()
        captured += cache.graph is not None
    return worst, captured


def _plain_logits(model: Any, rows: list[list[int]]) -> Tensor:
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=DEVICE)
    every = model(input_ids=ids, use_cache=False).logits
    return torch.stack([every[place, len(row) - 1] for place, row in enumerate(rows)])


def fall_backs(scratch: Path, report: Report) -> None:
    """Check which architectures share the cache and are captured, that those that are not say so, and that a capture
    that is left out takes no memory with it."""
    tokenizer = _tokenizer(small(vocabulary=997))
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 1e4}
    longrope["original_max_position_embeddings"] = 512
    half = SIZES["hidden_size"] // SIZES["num_attention_heads"] // 2
    longrope |= {"short_factor": [1.0] * half, "long_factor": [2.0] * half}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    kinds: list[tuple[str, dict[str, Any], bool | None]] = [  # whether it is captured; None: not known before
        ("Qwen2", {}, True),
        ("Llama", {}, True),
        ("Qwen3", {"head_dim": 64}, True),
        ("Phi3", {"rope_parameters": longrope, "pad_token_id": 0}, False),
        ("Qwen3Moe", experts | {"head_dim": 64}, None),
    ]
    for name, changes, expected in kinds:
        try:
            engine = TransformersEngine(_model(name, torch.bfloat16, **changes), tokenizer, 512)
        except Exception as error:  # a family that this release of transformers makes in another way ends no other
            report(Row(f"{name}: engine", f"{type(error).__name__}: {error}"[:200], "an engine", False))
            continue
        notes = "; ".join(engine.notes)
        equals(report, f"{name}: prompts' cache is shared", engine.shares_cache, True)
        captured = not any("without CUDA graphs" in note for note in engine.notes)
        passed = None if expected is None or not ON_GPU else captured == expected
        report(Row(f"{name}: captured", notes or "nothing falls back", str(expected or "as it says"), passed))
    if ON_GPU:
        equals(report, "the main thread's stream", torch.cuda.current_stream(), torch.cuda.default_stream())
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        block = torch.empty(2**30, device=DEVICE, dtype=torch.uint8)
        del block
        torch.cuda.empty_cache()
        equals(report, "memory that empty_cache gives back", torch.cuda.memory_reserved() - before, 0)


def stop_texts(scratch: Path, report: Report) -> None:
    """Count the host's waits per token step with `rollout.stop`, and what the texts cost."""
    model, tokenizer = _model("Qwen2", torch.bfloat16), _tokenizer(small(vocabulary=997))
    engine = TransformersEngine(model, tokenizer, 512)
    prompts, group, length = STOPPED
    requests = [Request([5 + number, 7, 9], group, seed=number) for number in range(prompts)]
    took: dict[tuple[str, ...], float] = {}
    for stop in ((), ("never written",), (), ("never written",)):  # the first two warm up
        start = time.perf_counter()
        with waits_of_host() as places:
            for _ in engine.generate(requests, Sampling(length, temperature=1.0, stop=stop)):
                pass
        took[stop] = (time.perf_counter() - start) / length
        if stop and ON_GPU:
            each = len(places) / length
    times = ", ".join(f"{1e3 * seconds:.2f} ms {'with' if stop else 'without'}" for stop, seconds in took.items())
    report(Row("a token step, with and without stop texts", times))
    if ON_GPU:
        report(Row("waits per token step with stop texts", f"{each:.2f}", f"at most {MOST_WAITS}", each <= MOST_WAITS))


def token_steps(scratch: Path, report: Report) -> None:
    """Measure a token step by captured graphs, of 8, 128 and 512 rows of a 0.5B model, and its prefill."""
    work = real("0.5B")
    sizes = {"hidden_size": work.hidden, "intermediate_size": work.intermediate, "num_hidden_layers": work.layers}
    sizes |= {"num_attention_heads": work.heads, "num_key_value_heads": work.kv_heads, "vocab_size": work.vocabulary}
    model = _model("Qwen2", torch.bfloat16 if ON_GPU else torch.float32, **sizes, tie_word_embeddings=True)
    steps, length = (400, 140) if not TINY else (8, 5)
    for prompts in (1, 16, 64):
        ids = [torch.randint(work.vocabulary, (length,)).tolist() for _ in range(prompts)]
        with torch.no_grad():
            start = time.perf_counter()
            cache = GroupCache(model, ids, [8] * prompts, steps, captures=ON_GPU)
            logits = cache.prefill()
            _wait()
            filled = time.perf_counter() - start
            for step in range(steps):
                if step == steps // 4:
                    _wait()
                    start = time.perf_counter()
                logits = cache.decode(logits.argmax(-1))
            _wait()
        each = (time.perf_counter() - start) / (steps - steps // 4)
        report(Row(f"{8 * prompts} rows, {length} + {steps} tokens", f"{1e3 * each:.2f} ms per token step"))
        report(Row(f"prefill of {prompts} prompts", f"{1e3 * filled:.0f} ms"))


def _wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def _model(name: str, dtype: torch.dtype, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    return model.eval().requires_grad_(False).to(DEVICE, dtype)
