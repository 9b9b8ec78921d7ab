"""Trainings of real sizes by the project's own loop: seconds, memory beside the forecast, a profile; and TRL's."""

from __future__ import annotations

import gc
import itertools
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.report import MISSING, ON_GPU, PEAK_FLOPS, PRECISION, Report, Row, equals, product_flops, real
from benchmarks.side_ours import prompt_lengths, replayed, run_directory
from benchmarks.workload import Workload, training_flops, write
from grpo_core import run_files
from grpo_core.config.files import load_config
from grpo_core.model.packed_attention import PackedBatch, _Varlen
from grpo_core.model.policy import Policy
from grpo_core.planning.hardware import find_gpu
from grpo_core.planning.memory import PlannedRun, peak_memory
from grpo_core.planning.passes import Pass
from grpo_core.planning.plan import load_plan
from grpo_core.planning.shapes import load_shape
from grpo_core.rollout.loading import fallbacks
from grpo_core.training import loop
from grpo_core.training import session as loaded_by
from grpo_core.training.log import TrainingLog
from grpo_core.training.session import Session

GIB = 2**30
FORECAST = (0.9, 1.1)  # the peak of a training, as a share of what was told
KERNELS = 12  # of a profile, in the table
TOO_MANY = 10**6  # tokens of a pass


def update_half(scratch: Path, report: Report) -> None:
    """Measure updates of 0.5B on stored completions of natural lengths, and where their time goes."""
    measure(report, scratch, real("0.5B"), profiled=True)


def update_large(scratch: Path, report: Report) -> None:
    """Measure updates of 1.5B."""
    measure(report, scratch, real("1.5B", prompts=8, steps=6))


def update_3b(scratch: Path, report: Report) -> None:
    """Measure updates of 3B with LoRA and with all weights' activations computed again: what one card holds."""
    keys = {"model.use_peft": True}
    measure(report, scratch, real("3B", prompts=8, steps=4, warm_up=1), keys)


def long_context(scratch: Path, report: Report) -> None:
    """Measure updates of 0.5B on completions of up to 32k tokens."""
    work = real("0.5B", prompts=2, group=4, completion=32_000, steps=3, warm_up=1)
    measure(report, scratch, work)


def end_to_end(scratch: Path, report: Report) -> None:
    """Measure whole steps with the transformers engine: a random model hardly ever ends a completion."""
    measure(report, scratch, real("0.5B", mode="generate", steps=4, warm_up=1))


def offloaded(scratch: Path, report: Report) -> None:
    """Measure updates with the moments in the host's memory."""
    measure(report, scratch, real("0.5B", steps=5), {"train.offload": "optimizer"})


def compiled(scratch: Path, report: Report) -> None:
    """Sample, and measure updates with torch.compile; count what is compiled in the first update, and after it."""
    measure(report, scratch, real("0.5B", steps=6, mode="generate"), {"train.torch_compile": True})


def out_of_memory(scratch: Path, report: Report) -> None:
    """Ask for passes that no card holds: memory runs out, passes are halved, and the training goes on."""
    work = real("0.5B", prompts=128, steps=3, warm_up=1)
    measure(report, scratch, work, too_large=True)


def measure(
    report: Report,
    scratch: Path,
    work: Workload,
    keys: dict[str, Any] | None = None,
    *,
    profiled: bool = False,
    too_large: bool = False,
    engine: str = "transformers",
) -> None:
    write(work, scratch / "workload")
    run = scratch / "run"
    run_directory(work, scratch / "workload", run, {"precision": PRECISION, "engine": engine, "keys": keys or {}})
    seconds: list[float] = []
    compilations: list[int] = []
    metrics: list[dict[str, float]] = []
    marks: list[float] = []
    sessions: list[Session] = []
    passes: list[list[Pass]] = []
    update, load, record, prepare = loop.update, loop.load_session, TrainingLog.step, Policy.prepare

    def timed(*arguments: Any) -> Any:
        last = profiled and len(seconds) == work.steps - 1
        passes.append([])
        _wait()
        start = time.perf_counter()
        with _profile(report, scratch) if last else nullcontext(), mock.patch.object(Policy, "prepare", prepared):
            found = update(*arguments)
            _wait()
        seconds.append(time.perf_counter() - start)
        compilations.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return found

    def prepared(policy: Policy, *arguments: Any) -> Any:
        inputs = prepare(policy, *arguments)
        passes[-1].append(_size(inputs))
        return inputs

    def loaded(*arguments: Any) -> Session:
        sessions.append(load(*arguments))
        return sessions[0]

    def step(log: Any, number: int, values: dict[str, float]) -> None:
        record(log, number, values)
        marks.append(time.perf_counter())
        metrics.append(values)

    with ExitStack() as stack:
        stack.enter_context(replayed(work, scratch / "workload"))
        stack.enter_context(mock.patch.multiple(loop, update=timed, load_session=loaded))
        stack.enter_context(mock.patch.object(TrainingLog, "step", step))
        if too_large:
            stack.enter_context(mock.patch.object(loaded_by, "first_limit", lambda *_: TOO_MANY))
        loop.train(run, run / "training")
    session: Any = sessions[0]
    report(Row("what falls back", "; ".join(fallbacks(session.sampler.engine, session.policy)) or "nothing"))
    counted = seconds[work.warm_up : work.steps - profiled]
    took = median(counted)
    spread = f"[{1e3 * min(counted):.0f}, {1e3 * max(counted):.0f}]"
    report(Row("update", f"{1e3 * took:.0f} ms {spread}, first {seconds[0]:.1f} s"))
    made = metrics[work.warm_up :]
    whole = median(after - before for before, after in itertools.pairwise(marks[work.warm_up - 1 :]))
    names = sorted({name for row in made for name in row if name.startswith("time/") and name.count("/") == 1})
    parts = "; ".join(f"{name[5:]} {1e3 * median(row.get(name, 0) for row in made):.0f}" for name in names)
    report(Row("step, between two lines of the log", f"{1e3 * whole:.0f} ms; of it: {parts}"))
    if work.mode == "replay":
        flops, tokens = training_flops(work), _packed_tokens(work, scratch / "workload")
        share = f"{flops / took / PEAK_FLOPS:.1%} of {PEAK_FLOPS / 1e12:.0f} TFLOP/s" if ON_GPU else "on a CPU"
        report(Row("packed tokens, needed FLOP, share of the peak", f"{tokens:,}, {flops / 1e12:.1f} T, {share}"))
        if ON_GPU:
            report(Row("share of a product measured here", f"{flops / took / product_flops():.1%}"))
    else:
        each = 1e3 * median(row["time/generate"] / row["completions/max_length"] for row in made)
        rate = median(work.completions * row["completions/mean_length"] / row["time/generate"] for row in made)
        report(Row("sampling", f"{each:.2f} ms per token step of {work.completions} rows, {rate:.0f} tokens/s"))
    if keys and keys.get("train.torch_compile"):
        after, most = compilations[-1] - compilations[0], 0 if ON_GPU else 1
        report(Row("compilations in the first update", str(compilations[0]), "some", compilations[0] > 0))
        # Padded blocks, which a GPU does not use, are compiled once more for a pass of a single prompt.
        report(Row("compilations after the first update", str(after), f"at most {most}", after <= most))
        equals(report, "layers that run uncompiled", session.policy.uncompiled, [])
    if keys and keys.get("train.offload") == "optimizer":
        states = session.optimizer.state.values()
        moments = {moment.device.type for state in states for moment in state.values() if moment.ndim}
        equals(report, "where the moments rest", ", ".join(sorted(moments)), "cpu")
    reduced = session.memory.reduced
    if too_large:
        report(Row("tokens per pass after memory ran out", str(reduced), "fewer", reduced is not None or not ON_GPU))
    elif reduced is not None:
        report(Row("tokens per pass after memory ran out", str(reduced), "memory does not run out", False))
    of_update = [len(each) for each in passes]
    most = max(each.tokens for each in itertools.chain(*passes))
    report(Row("passes per update, tokens of the largest", f"{median(of_update):g}, {most:,}"))
    report(Row("tokens per pass by the plan", f"{load_plan(run / run_files.PLAN).max_tokens_per_pass}"))
    if ON_GPU and not too_large and engine == "transformers":  # torch counts the cache that vLLM lends, too
        largest = max(itertools.chain(*passes), key=lambda size: size.tokens)
        beside_forecast(report, forecast_gib(run, work, replace(largest, alone=max(of_update) == 1)))


def beside_forecast(report: Report, told: float) -> None:
    """Report the peak memory of this process beside a forecast in GiB."""
    peak, (low, high) = torch.cuda.max_memory_allocated() / GIB, FORECAST
    share = peak / told
    report(Row("peak memory, reserved", f"{peak:.2f} GiB, {torch.cuda.max_memory_reserved() / GIB:.2f} GiB"))
    found = f"{share:.2f} of {told:.2f} GiB"
    report(Row("peak as share of the forecast", found, f"{low} to {high}", low <= share <= high))


def forecast_gib(run: Path, work: Workload, largest: Pass) -> float:
    """Forecast for the largest pass that a training made."""
    config, plan = load_config(run / run_files.CONFIG), load_plan(run / run_files.PLAN)
    gpu, shape = find_gpu(), load_shape(config.model.name_or_path)
    assert gpu is not None
    return peak_memory(PlannedRun(config, plan, shape, prompt_lengths(work), gpu), largest)["peak_memory_gib"]


def _size(inputs: Any) -> Pass:
    """Sizes of a pass, as the forecast counts them."""
    packed = isinstance(inputs.tokens, PackedBatch)
    tokens = inputs.tokens.input_ids.numel()
    keys = len(inputs.tokens.attention.keys) if packed and inputs.tokens.attention.__class__ is _Varlen else tokens
    return Pass(tokens, keys, len(inputs.targets))


def _packed_tokens(work: Workload, folder: Path) -> int:
    """Tokens per update, each prompt once; mean over the counted steps."""
    steps = json.loads((folder / "completions.json").read_text())[work.warm_up :]
    prompts = sum(map(len, pq.read_table(folder / "prompts.parquet")["prompt"].to_pylist()))
    return prompts + round(sum(len(ids) - 1 for step in steps for group in step for ids in group) / len(steps))


@contextmanager
def _profile(report: Report, scratch: Path) -> Iterator[None]:
    """Profile the block: the largest kernels become rows, the whole table a file beside the results."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
    with profile(activities=kinds) as found:
        yield
    key = "self_device_time_total" if ON_GPU else "self_cpu_time_total"
    averages = found.key_averages()
    folder = Path(os.environ.get("GPU_CHECK_PROFILES", scratch))
    (folder / "profile.txt").write_text(averages.table(sort_by=key, row_limit=60, max_name_column_width=90))
    timed = sorted(averages, key=lambda event: -getattr(event, key))
    if ON_GPU:
        timed = [event for event in timed if str(event.device_type).endswith("CUDA")]
    total = sum(getattr(event, key) for event in timed) or 1
    report(Row("kernels, together", f"{total / 1e3:.1f} ms in {sum(event.count for event in timed)}"))
    for event in timed[:KERNELS]:
        own = getattr(event, key)
        report(Row(event.key[:60], f"{own / 1e3:.2f} ms, {own / total:.0%}, {event.count} times"))


def _wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def peer_update(scratch: Path, report: Report) -> None:
    """Measure TRL's updates on the same completions: as it comes, and with Liger's kernels and the most rows that
    fit."""
    _peer(scratch, report, real("0.5B", steps=4, warm_up=1), [(32, False)], [(rows, True) for rows in (128, 64, 32)])


def peer_end_to_end(scratch: Path, report: Report) -> None:
    """Measure TRL's whole steps with its own generation."""
    _peer(scratch, report, real("0.5B", mode="generate", steps=2, warm_up=1), [(32, False)])


def _peer(scratch: Path, report: Report, work: Workload, *tried: list[tuple[int, bool]]) -> None:
    """Of each list of (rows per pass, Liger's kernels), report the first that fits."""
    from benchmarks.side_trl import main

    write(work, scratch / "workload")
    for settings in tried:
        for rows, liger in settings:
            rows = min(rows, work.completions)
            name = f"TRL, {work.mode}, {rows} rows per pass{', Liger' if liger else ''}"
            if liger and not ON_GPU:
                report(Row(name, MISSING))
                break
            if ON_GPU:
                torch.cuda.reset_peak_memory_stats()
            values = {"precision": PRECISION, "rows": rows, "checkpointing": False, "liger": liger}
            try:
                main(scratch / "workload", values, scratch / "result.json")
            except torch.OutOfMemoryError:
                report(Row(name, "out of memory"))
                gc.collect()
                torch.cuda.empty_cache()
                continue
            seconds = json.loads((scratch / "result.json").read_text())["seconds"]
            peak = f", {torch.cuda.max_memory_allocated() / GIB:.1f} GiB" if ON_GPU else ""
            report(Row(name, f"{1e3 * median(seconds):.0f} ms per step{peak}"))
            break
