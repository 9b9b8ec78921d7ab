"""The checks of `benchmarks.gpu_check`, each run in a process of its own:

python -m benchmarks.gpu_checks CHECK SCRATCH ROWS
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.cases import QWEN
from benchmarks.gpu_check import Row, append
from benchmarks.gpu_reference import (
    DEVICE,
    ON_GPU,
    device_seconds,
    distance,
    draw_sequences,
    gradient,
    plain,
    plain_head,
)
from benchmarks.side_ours import replayed, run_directory
from benchmarks.vs_trl import OutOfMemoryError, run
from benchmarks.workload import Workload, training_flops, write
from grpo_core.config.files import dump_config, load_config, parse_config
from grpo_core.config.inputs import ModelConfig
from grpo_core.config.training import TrainConfig
from grpo_core.data.prompts import load_tokenizer
from grpo_core.model.loading import load_model, with_adapter
from grpo_core.model.logprobs import chosen_logprobs
from grpo_core.model.policy import Policy
from grpo_core.planning.hardware import find_gpu
from grpo_core.planning.memory import peak_memory
from grpo_core.planning.plan import load_plan
from grpo_core.rollout.fallbacks import fallbacks
from grpo_core.rollout.transformers_engine import TransformersEngine
from tasks.processes.launch import process_environment, torchrun
from tasks.processes.machine import free_port

PRECISION = "bf16" if ON_GPU else "no"
PACKED = {"no": "flex", "bf16": "varlen"} if ON_GPU else {"no": "padded", "bf16": "padded"}  # kinds of attention
SMALL = (  # the model of every check except memory and speed: 40 million parameters, or 100 thousand on a CPU
    Workload(hidden=512, intermediate=1536, layers=8, heads=8, vocabulary=16_384, completion=64, mode="generate")
    if ON_GPU
    else Workload(hidden=64, intermediate=128, layers=2, vocabulary=512, prompts=2, prompt_lengths=(8, 24), group=4,
                  completion=16, mode="generate")
)  # fmt: skip
REAL = Workload(**QWEN["0.5B"], prompts=16, prompt_lengths=(60, 220), completion=512, steps=4)
LARGE = REAL if ON_GPU else replace(SMALL, mode="replay")
PROMPTS = {"train": "workload", "eval": "held-out"}  # folders
MOST_WAITS = 4  # of the host for the device per update
EXACT = 1e-4  # relative distance of float32 gradients that differ only by rounding
ROUNDING = 2.0  # times the distance of plain bfloat16 rows from float32
MISSING = "needs a GPU"

Report = Callable[[Row], None]


def hardware(scratch: Path, report: Report) -> None:
    """List the machine's parts: driver, GPUs, a C compiler for Triton."""
    report(Row("processor cores", str(os.cpu_count())))
    compiler = shutil.which("gcc") or shutil.which("cc")
    report(Row("a C compiler, which Triton needs", compiler or "none", "there", bool(compiler) or not ON_GPU))
    if not ON_GPU:
        report(Row("GPU", "none", MISSING))
        return
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0].strip()
    report(Row("driver", driver, "580 or later", int(driver.partition(".")[0] or 0) >= 580))
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        capability = found.major + found.minor / 10
        memory = f"{found.total_memory / 2**30:.0f} GiB, sm {capability:g}"
        report(Row(f"GPU {number}: {found.name}", memory, "sm 8 or later", capability >= 8))
    size = 8192
    product = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16)
    rate = 2 * size**3 / device_seconds(lambda: product @ product) / 1e12
    report(Row("a bfloat16 matrix product", f"{rate:.0f} TFLOP/s"))


def attention(scratch: Path, report: Report) -> None:
    """Compare log-probabilities and gradients of every kind of policy with plain rows in float32, and ask what it does
    in a slower or other way."""
    write(SMALL, scratch / "workload")
    tokenizer = load_tokenizer(ModelConfig(name_or_path=str(scratch / "workload" / "model")))
    sequences = draw_sequences(SMALL)
    for precision in ("no", "bf16"):
        for kind in ("all weights", "LoRA", "frozen"):
            policy = Policy(_model(scratch, kind), 0.9, bf16=precision == "bf16")
            expected = plain(_model(scratch, kind), sequences, 0.9)
            logprobs, _ = policy(policy.prepare(sequences))
            found = [[logprobs.detach()], gradient(policy.master, logprobs)]
            way, wanted = policy.attention if policy.packs else policy.why_not, PACKED[precision]
            report(Row(f"{precision}, {kind}: packed for", way, wanted, way == wanted))
            engine = TransformersEngine(policy.model, tokenizer)
            notes = fallbacks(engine, policy)
            report(Row(f"{precision}, {kind}: fall-backs", "; ".join(notes) or "none", "none", not notes))
            half = plain(_model(scratch, kind).bfloat16(), sequences, 0.9) if precision == "bf16" else expected
            for what, ours, plainly, rounded in zip(
                ("log-probabilities", "gradient"), found, expected, half, strict=True
            ):
                if plainly:  # a frozen model has no gradient
                    away, bound = distance(ours, plainly), max(EXACT, ROUNDING * distance(rounded, plainly))
                    name = f"{precision}, {kind}: {what} from float32"
                    report(Row(name, f"{away:.1e}", f"at most {bound:.1e}", away <= bound))


def head(scratch: Path, report: Report) -> None:
    """Check that the output layer at a real vocabulary is exact and fast, and does not keep the logits of all
    tokens."""
    tokens, width, vocabulary = (8192, 896, 151_936) if ON_GPU else (256, 64, 8192)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    hidden = torch.randn(tokens, width, device=DEVICE, dtype=dtype, requires_grad=True)
    weight = (torch.randn(vocabulary, width, device=DEVICE, dtype=dtype) / width**0.5).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=DEVICE)

    def work() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        hidden.grad = weight.grad = None
        logprobs, entropy = chosen_logprobs(hidden, weight, targets, 0.9)
        (logprobs.sum() + entropy.sum()).backward()
        return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad  # type: ignore[return-value]

    found = work()
    expected = plain_head(hidden.detach(), weight.detach(), targets, 0.9)
    bound = 2e-2 if ON_GPU else EXACT  # bfloat16 products
    for name, ours, plainly in zip(
        ("log-probabilities", "entropies", "gradient of the states", "gradient of the weights"),
        found,
        expected,
        strict=True,
    ):
        away = distance([ours], [plainly])
        report(Row(f"{name} from float32", f"{away:.1e}", f"at most {bound:.0e}", away <= bound))
    report(Row(f"forward and backward, V = {vocabulary:,}", f"{1e6 * device_seconds(work) / tokens:.1f} us per token"))
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        report(Row("memory that it adds", f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f} MiB"))


def engines(scratch: Path, report: Report) -> None:
    """Run the whole pipeline by `grpo run` with every engine, also with hand-over of the adapter alone."""
    write(SMALL, scratch / PROMPTS["train"])
    write(replace(SMALL, seed=1), scratch / PROMPTS["eval"])
    kinds = [("transformers", False), ("vllm", False), ("vllm", True), ("vllm-server", False)]
    for engine, lora in kinds:
        name = f"{engine}{', LoRA' if lora else ''}, {PRECISION}"
        config = scratch / f"{engine}-{lora}.toml"
        config.write_text(_configuration(scratch, engine, lora))
        start = time.perf_counter()
        grpo = [sys.executable, "-m", "flows.cli.main", "run", str(config)]
        code = subprocess.run(grpo, env=os.environ | {"GRPO_STORAGE": str(scratch / "storage")}).returncode
        seconds = time.perf_counter() - start
        report(Row(f"{name}: grpo run", f"status {code}, {seconds:.0f} s", "status 0", code == 0))
        steps = scratch / "storage" / "runs" / config.stem / "training" / "metrics.jsonl"
        if code == 0:
            metrics = [json.loads(line) for line in steps.read_text().splitlines()]
            drift = max(step["sampling/sync_drift"] for step in metrics)
            report(Row(f"{name}: engine from trainer, probe", f"{drift:.1e}"))
            apart = max(step["sampling/sampling_logp_difference/mean"] for step in metrics)
            report(Row(f"{name}: engine from trainer, samples", f"{apart:.1e}"))


def waits(scratch: Path, report: Report) -> None:
    """Count how often the host waits for the GPU per update, as torch reports it."""
    if not ON_GPU:
        report(Row("waits per update", MISSING, f"at most {MOST_WAITS}"))
        return
    from grpo_core.training import loop

    workload = replace(SMALL, mode="replay")
    write(workload, scratch / "workload")
    run_directory(workload, scratch / "workload", scratch / "run", {"precision": PRECISION})
    counts: list[int] = []
    update = loop.update

    def counted(*arguments: Any) -> Any:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                return update(*arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                counts.append(sum("synchroniz" in str(warning.message) for warning in caught))

    with replayed(workload, scratch / "workload"), mock.patch.object(loop, "update", counted):
        loop.train(scratch / "run", scratch / "run" / "training")
    found = median(counts[1:])  # the first one compiles
    report(Row("waits per update", f"{found:g}", f"at most {MOST_WAITS}", found <= MOST_WAITS))


def memory(scratch: Path, report: Report) -> None:
    """Compare a training's peak memory with the forecast of `grpo plan`."""
    gpu = find_gpu()
    if gpu is None:
        report(Row("peak memory, as share of the forecast", MISSING, "0.6 to 1.1"))
        return
    from grpo_core.planning.shapes import PromptLengths, load_shape
    from grpo_core.training.loop import train

    write(LARGE, scratch / "workload")
    run_directory(LARGE, scratch / "workload", scratch / "run", {"precision": PRECISION})
    config, plan = load_config(scratch / "run" / "config.toml"), load_plan(scratch / "run" / "plan.json")
    low, high = LARGE.prompt_lengths
    lengths = PromptLengths((low + high) / 2, high, "by the workload")
    told = peak_memory(config, plan, load_shape(config.model.name_or_path), lengths, gpu)
    with replayed(LARGE, scratch / "workload"):
        train(scratch / "run", scratch / "run" / "training")
    peak = torch.cuda.max_memory_allocated() / 2**30
    share = peak / told["peak_memory_gib"]
    report(Row("peak memory", f"{peak:.1f} GiB"))
    report(Row("as share of the forecast", f"{share:.2f}", "0.6 to 1.1", 0.6 <= share <= 1.1))


def resume(scratch: Path, report: Report) -> None:
    """Check that a training that is stopped and continued, with moments offloaded or not, ends with the same
    weights."""
    write(SMALL, scratch / "workload")
    _compare_stopped(scratch, report, {})


def processes(scratch: Path, report: Report) -> None:
    """Check that two training processes take the same step as one and, if sharded, can also be stopped."""
    if ON_GPU and torch.cuda.device_count() < 2:
        report(Row("two processes", "needs two GPUs"))
        return
    write(SMALL, scratch / "workload")
    first = []
    for count in (1, 2):
        _trained(scratch, f"processes-{count}", {"processes": count})
        metrics = scratch / f"processes-{count}" / "training" / "metrics.jsonl"
        first.append(json.loads(metrics.read_text().splitlines()[0]))
    for metric in ("grad_norm", "entropy"):
        one, two = (row[metric] for row in first)
        away = abs(two - one) / max(abs(one), 1e-6)
        bound = 1e-4 if PRECISION == "no" else 2e-2
        report(Row(f"{metric} of the first update, relative", f"{away:.1e}", f"at most {bound:.0e}", away <= bound))
    _compare_stopped(scratch, report, {"processes": 2, "sharding": "full"})


def speed(scratch: Path, report: Report) -> None:
    """Measure the training phase in small, and TRL's if it is installed."""
    write(LARGE, scratch / "workload")
    ours = median(run("ours", {"precision": PRECISION}, scratch / "workload")["seconds"])
    report(Row("ours, training phase", f"{ours:.3f} s per update"))
    if ON_GPU:
        size = 8192
        matrix = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16)
        share = training_flops(LARGE) / ours / (2 * size**3 / device_seconds(lambda: matrix @ matrix))
        report(Row("of what a matrix product does here", f"{share:.0%}"))
    rows = min(32, LARGE.completions)
    settings = {"precision": PRECISION, "rows": rows, "checkpointing": False}
    try:
        theirs = median(run("trl", settings, scratch / "workload")["seconds"])
    except OutOfMemoryError:
        report(Row(f"TRL, {rows} rows", "out of memory"))
    except SystemExit as error:
        report(Row("TRL", "not installed" if "No module named 'trl'" in str(error) else "failed"))
    else:
        report(Row(f"TRL, {rows} rows, not tuned", f"{theirs:.3f} s per update"))
        report(Row("times as fast as TRL", f"{theirs / ours:.2f}"))


def _model(scratch: Path, kind: str) -> Any:
    model = load_model(scratch / "workload" / "model").to(DEVICE)
    if kind == "frozen":
        return model.requires_grad_(False)
    torch.manual_seed(0)
    model = with_adapter(model, ModelConfig(name_or_path="model", use_peft=kind == "LoRA"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)  # it starts at zero
    return model


def _configuration(scratch: Path, engine: str, lora: bool) -> str:
    """Configuration that runs the workload with the real pipeline, named after its engine."""
    values: dict[str, Any] = {
        "name": f"{engine}-{lora}",
        "model": {"name_or_path": str(scratch / "workload" / "model"), "use_peft": lora},
        "data": {part: str(scratch / name / "prompts.parquet") for part, name in PROMPTS.items()},
        "rewards": [{"function": "benchmarks.workload:spread"}],
        "rollout": {"engine": engine, "num_generations": SMALL.group, "max_completion_length": SMALL.completion}
        # A server takes a GPU of its own or, with ipc, a part of the training's.
        | ({"vllm_weight_transfer": "ipc"} if engine == "vllm-server" and torch.cuda.device_count() == 1 else {}),
        "train": {
            "mixed_precision": PRECISION,
            "per_device_train_batch_size": SMALL.completions,
            "max_steps": SMALL.steps,
            "learning_rate": 1e-4,
        },
    }
    return dump_config(parse_config(values))


def _compare_stopped(scratch: Path, report: Report, settings: dict[str, Any]) -> None:
    """Compare the weights of trainings that were stopped after half of their updates with those of undisturbed ones."""
    one, two, cut = (_trained(scratch, name, settings, stopped=name == "cut") for name in ("one", "two", "cut"))
    offloaded = _trained(scratch, "offloaded", settings | {"offload": "optimizer"}, stopped=True)
    noise, kinds = distance(two, one), {"stopped after half, and continued": cut, "and offloaded": offloaded}
    report(Row("the same training twice", f"{noise:.1e}", "0 where kernels repeat"))
    for what, away in ((what, distance(found, one)) for what, found in kinds.items()):
        report(Row(what, f"{away:.1e}", f"at most {2 * noise:.1e}", away <= 2 * noise))


def _in_processes(train: TrainConfig, command: Sequence[str]) -> list[str]:
    """Arguments of `python` that run a command in the configured number of processes here, without supervision."""
    if train.num_processes == 1:
        return [*command]
    return ["-m", "tasks.processes.ranks", *torchrun(train, "127.0.0.1", free_port()), *command]


def _trained(scratch: Path, name: str, settings: dict[str, Any], *, stopped: bool = False) -> list[Tensor]:
    """Train and return the weights. `stopped`: stop the training by SIGTERM after half of its updates, and continue
    it."""
    run = scratch / name
    run_directory(SMALL, scratch / "workload", run, {"precision": PRECISION, **settings})
    config = load_config(run / "config.toml")
    command = [sys.executable, *_in_processes(config.train, ["-m", "grpo_core.train", str(run)])]
    environment, steps = os.environ | process_environment(config), run / "training" / "metrics.jsonl"
    if stopped:
        process = subprocess.Popen(command, env=environment)
        while process.poll() is None and not (
            steps.exists() and len(steps.read_text().splitlines()) >= SMALL.steps // 2
        ):
            time.sleep(0.02)
        process.terminate()
        process.wait()
    subprocess.run(command, env=environment, check=True)
    files = sorted((run / "training" / "model").glob("*.safetensors"))
    return [weights for file in files for _, weights in sorted(load_file(file).items())]


if __name__ == "__main__":
    name, scratch, rows = sys.argv[1:]
    globals()[name](Path(scratch), lambda row: append(Path(rows), row))
