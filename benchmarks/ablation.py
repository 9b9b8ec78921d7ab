"""Measures what each optimisation of update and sampling gains by itself: compares the loop with the loop without it.

    python -m benchmarks.ablation [--rounds 5] [--tiny]

One process, one rollout; the variants take turns, in this order and back. Prints medians, and their ratio to the
unchanged loop. Where a processor has no instructions for bf16, its case is left out.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState

from benchmarks.cases import GENERATE, LONG_PROMPTS, SMALL, TINY, tiny
from benchmarks.command import parse
from benchmarks.side_ours import replayed, run_directory
from benchmarks.vs_trl import multiplies_faster_in_bf16
from benchmarks.workload import Workload, write

Variant = Callable[[Any], AbstractContextManager[Any]]


def patched(name: str, value: Any) -> Variant:
    return lambda _: mock.patch(f"grpo_core.{name}", value)


all_rows = patched("training.update.own_rows", lambda batch, *_, **__: batch)
one_large_pass = patched("training.out_of_memory.CPU_TOKENS", 2**30)
fused_attention = patched("model.packed_attention.SHORT", {})
padded_to_the_longest = patched("model.packed_attention.ALIKE", -1.0)
all_logits_at_once = patched("config.memory_bounds.CHUNK_LOGITS", 2**40)
no_kept_probabilities = patched("model.logprobs.KEPT_LOGITS", 0)


@contextmanager
def as_it_is(session: Any) -> Iterator[None]:
    yield


@contextmanager
def padded_rows(session: Any) -> Iterator[None]:
    session.policy.packs = False
    yield
    session.policy.packs = True


@contextmanager
def unfused_adamw(session: Any) -> Iterator[None]:
    for group in session.optimizer.param_groups:
        group["fused"] = False
    yield
    for group in session.optimizer.param_groups:
        group["fused"] = True


@contextmanager
def old_logprobs_pass(session: Any) -> Iterator[None]:
    from grpo_core.model.sequences import pack
    from grpo_core.training import update as module
    from grpo_core.training.out_of_memory import CPU_TOKENS

    update = module.update

    def with_a_pass(session: Any, batch: Any, progress: Any) -> Any:
        with torch.no_grad():
            for part in pack(batch.sequences, CPU_TOKENS, share_prompts=session.policy.packs):
                session.policy(session.policy.prepare(batch.sequences.take(part)))
        return update(session, batch, progress)

    with mock.patch("grpo_core.training.update.update", with_a_pass):
        yield


@contextmanager
def prompt_for_each_completion(session: Any) -> Iterator[None]:
    with mock.patch.object(session.sampler.engine, "shares_cache", False):
        yield


SAMPLING = {"as it is": as_it_is, "each completion's prompt by itself": prompt_for_each_completion}
CASES: list[tuple[str, Workload, str, dict[str, Any]]] = [
    (
        "5.8M, float32",
        SMALL,
        "no",
        {
            "as it is": as_it_is,
            "padded rows, each with its prompt": padded_rows,
            "no bound on the tokens of a pass": one_large_pass,
            "AdamW not fused": unfused_adamw,
            "a pass for old log-probabilities": old_logprobs_pass,
            "all logits at once": all_logits_at_once,
            "probabilities computed again": no_kept_probabilities,
            "attention padded to the longest completion": padded_to_the_longest,
        },
    ),
    ("half of the groups silent", replace(SMALL, silent=0.5), "no", {"as it is": as_it_is, "all rows": all_rows}),
    ("prompts 8×", LONG_PROMPTS, "no", {"as it is": as_it_is, "padded rows, each with its prompt": padded_rows}),
    ("5.8M, bf16", SMALL, "bf16", {"as it is": as_it_is, "torch's fused attention": fused_attention}),
    ("0.8M, sampling", TINY, "no", SAMPLING),
    ("5.8M, sampling", GENERATE, "no", SAMPLING),
]


def main() -> None:
    parser = argparse.ArgumentParser(description="What each optimisation of the update gains by itself.")
    parser.add_argument("--rounds", type=int, default=5)
    options = parse(parser)
    for name, workload, precision, variants in CASES:
        if precision == "bf16" and not multiplies_faster_in_bf16():
            continue
        print(name)
        seconds = measure(tiny(workload) if options.tiny else workload, precision, variants, options.rounds)
        base = median(seconds["as it is"])
        for variant, found in seconds.items():
            print(f"  {variant:44} {median(found):7.3f} s  {median(found) / base:5.2f}×", flush=True)


def measure(workload: Workload, precision: str, variants: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    from grpo_core.training import update as module
    from grpo_core.training.batch import update_batch
    from grpo_core.training.roll_out import roll_out
    from grpo_core.training.session import load_session
    from grpo_core.training.state import TrainingState

    with tempfile.TemporaryDirectory() as scratch:
        folder, run = Path(scratch, "workload"), Path(scratch, "run")
        write(workload, folder)
        with replayed(workload, folder):
            run_directory(workload, folder, run, {"precision": precision})
            session = load_session(run)
            progress = TrainingState(tokens_per_pass=session.memory.tokens)
            rollout, *_ = roll_out(session, 0, progress)
        batch = update_batch([(rollout, 0)], session.plan, session.config)
        is_sampled = workload.mode == "generate"
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range(rounds + 1):
            for name in variants if turn % 2 == 0 else reversed(variants):
                with ExitStack() as stack:
                    stack.enter_context(variants[name](session))
                    start = time.perf_counter()
                    roll_out(session, 0, progress) if is_sampled else module.update(session, batch, progress)
                    if turn:  # the first is warm-up
                        seconds[name].append(time.perf_counter() - start)
        AcceleratorState._reset_state(reset_partial_state=True)
    return seconds


if __name__ == "__main__":
    main()
