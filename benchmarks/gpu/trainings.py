"""Whole trainings by `python -m grpo_core.train`: stopped and continued, deterministic, with adapters, in 4 bits, of a
hybrid."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, GenerationConfig

from benchmarks.gpu.report import ON_GPU, PRECISION, TINY, Report, Row, at_most, distance, equals, small
from benchmarks.side_ours import run_directory
from benchmarks.workload import Workload, write
from grpo_core import run_files
from grpo_core.config.files import load_config
from grpo_core.model.four_bit import dequantised
from grpo_core.model.loading import load_model
from tasks.processes.launch import process_environment

STOP_AFTER = 3  # updates
BEGINS = ("training: starting", "training: continuing")  # the beginnings of the line that says where
KEPT: dict[str, Any] = {"train.save_steps": 1, "train.save_total_limit": 20}
TRAIN = ["-m", "grpo_core.train"]  # arguments of `python`
NOISE = 5e-2  # relative, between gradient norms of the same update by kernels that add in another order
# A training in which importing the kernels of hybrids fails.
WITHOUT_KERNELS = """
import sys
sys.modules |= dict.fromkeys(("causal_conv1d", "fla"))
from grpo_core.train import main
main()
"""
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "eos_token_id", "pad_token_id")
CLOCKS = ("time/", "step_time", "timestamp")  # figures that no two runs have alike


@dataclass(frozen=True)
class Done:
    status: int
    said: str
    seconds: float


def start(run: Path, program: Sequence[str] | None = None) -> subprocess.Popen[str]:
    """Start the training of a run directory as a stage does, its output in RUN/said."""
    config = load_config(run / run_files.CONFIG)
    with (run / "said").open("w") as said:
        return subprocess.Popen(
            [sys.executable, *(program or TRAIN), str(run)],
            env=os.environ | process_environment(config),
            stdout=said,
            stderr=said,
            text=True,
            start_new_session=True,
        )


def train(run: Path, program: Sequence[str] | None = None) -> Done:
    """Train to the end; its output is printed too."""
    began = time.perf_counter()
    status = start(run, program).wait()
    said = (run / "said").read_text()
    print(f"=== {run.name}: status {status}\n{said[-6000:]}", flush=True)
    return Done(status, said, time.perf_counter() - began)


def stop_after(run: Path, updates: int, program: Sequence[str] | None = None) -> tuple[int, int]:
    """Train, and send SIGTERM once this many updates are recorded; returns status and process group."""
    process = start(run, program)
    while process.poll() is None and len(metrics_of(run)) < updates:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    status = process.wait()
    print(f"=== {run.name}, stopped: status {status}\n{(run / 'said').read_text()[-3000:]}", flush=True)
    return status, process.pid


def metrics_of(run: Path) -> list[dict[str, float]]:
    """Whole lines of metrics.jsonl."""
    path = run / "training" / run_files.METRICS
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def weights_of(run: Path, folder: str = run_files.MODEL) -> dict[str, Tensor]:
    return _tensors(run / "training" / folder)


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: weights for file in sorted(folder.glob("*.safetensors")) for name, weights in load_file(file).items()}


def resume(scratch: Path, report: Report) -> None:
    """Stop a training by SIGTERM and continue it: it goes on where it was, and its next update is the undisturbed
    training's from the same checkpoint. Kernels add in an order of their own here, so weights are not compared."""
    work, data = small(steps=6), scratch / "workload"
    write(work, data)
    whole, cut, again = (scratch / name for name in ("whole", "cut", "again"))
    for run in (whole, cut):
        run_directory(work, data, run, {"precision": PRECISION, "keys": KEPT})
    equals(report, "undisturbed: status", train(whole).status, 0)
    stopped_and_continued(report, cut, work)
    shutil.copytree(whole, again, symlinks=True)
    forget_after(again, STOP_AFTER)
    train(again)
    same_next_update(report, again, whole, STOP_AFTER, exact=False)


def stopped_and_continued(report: Report, run: Path, work: Workload, program: Sequence[str] | None = None) -> None:
    """Report on a training that is stopped and continued: statuses, the step that it goes on from, its record, and that
    nothing of it is left."""
    status, group = stop_after(run, STOP_AFTER, program)
    equals(report, "stopped by SIGTERM: status", status, 143)
    nothing_left(report, group)
    done = len(metrics_of(run))
    kept = sorted(path.name for path in (run / "training" / run_files.CHECKPOINTS).glob("step-*"))
    equals(report, "newest checkpoint", kept[-1] if kept else "none", f"step-{done:06d}")
    before = [row["timestamp"] for row in metrics_of(run)]
    continued = train(run, program)
    equals(report, "continued: status", continued.status, 0)
    begins = [line for line in continued.said.splitlines() if line.startswith(BEGINS)]
    begun = begins[0] if begins else "nothing"
    report(Row("continued: where it begins", begun, f"continuing after step {done}", f"after step {done}," in begun))
    rows = metrics_of(run)
    equals(report, "steps that are recorded", [row["step"] for row in rows], [*range(1, work.steps + 1)])
    equals(report, "updates that were not made again", [row["timestamp"] for row in rows[:done]] == before, True)


def forget_after(run: Path, step: int) -> None:
    """Make of a finished training one that ended after `step`."""
    training = run / "training"
    for folder in (training / run_files.CHECKPOINTS).glob("step-*"):
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    (training / run_files.RESULT).unlink()
    shutil.rmtree(training / run_files.MODEL)


def same_next_update(report: Report, run: Path, whole: Path, step: int, *, exact: bool) -> None:
    """Compare the first update after `step` with the undisturbed training's: what was sampled, and the gradient."""
    ours, theirs = (next((row for row in metrics_of(r) if row["step"] == step + 1), None) for r in (run, whole))
    if ours is None or theirs is None:
        report(Row("first resumed update", "none", "there", False))
        return
    tokens = [_completions(r, step) for r in (run, whole)]
    same = sum(a == b for a, b in zip(*tokens, strict=True)) / len(tokens[0])
    least = 1.0 if exact else 0.9
    report(Row("first resumed update: equal completions", f"{same:.0%}", f"at least {least:.0%}", same >= least))
    if exact:
        names = [name for name in theirs if not name.startswith(CLOCKS)]
        other = [name for name in names if ours.get(name) != theirs[name]]
        equals(report, "first resumed update: figures that differ", ", ".join(other), "")
    elif same == 1:
        away = abs(ours["grad_norm"] - theirs["grad_norm"]) / theirs["grad_norm"]
        at_most(report, "first resumed update: gradient norm, relative", away, NOISE)


def _completions(run: Path, index: int) -> list[str]:
    [file] = (run / "training" / run_files.COMPLETIONS).glob(f"*{index:06d}.parquet")
    return pq.read_table(file, columns=["completion"])["completion"].to_pylist()


def nothing_left(report: Report, group: int) -> None:
    """Check that no process of a group is left, here or on the GPU."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            members.append(path.parent.name)
    if ON_GPU:
        query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
        said = subprocess.run(query, capture_output=True, text=True).stdout.split()
        members += [pid for pid in said if pid == str(group)]
    equals(report, "processes that are left", ", ".join(members), "")


def deterministic(scratch: Path, report: Report) -> None:
    """Check that with `train.deterministic` a training that was stopped and continued equals an undisturbed one to the
    bit, that moments in the host's memory change nothing, and what the key costs."""
    work, data = small(steps=6), scratch / "workload"
    write(work, data)
    exact = KEPT | {"train.deterministic": True}
    plain, whole, cut, offloaded = (scratch / name for name in ("plain", "whole", "cut", "offloaded"))
    run_directory(work, data, plain, {"precision": PRECISION, "keys": KEPT})
    for run in (whole, cut):
        run_directory(work, data, run, {"precision": PRECISION, "keys": exact})
    run_directory(work, data, offloaded, {"precision": PRECISION, "keys": exact | {"train.offload": "optimizer"}})
    for run in (plain, whole, offloaded):
        equals(report, f"{run.name}: status", train(run).status, 0)
    stopped_and_continued(report, cut, work)
    for run in (cut, offloaded):
        equal_tensors(report, run.name, weights_of(run), weights_of(whole))
    same_next_update(report, cut, whole, STOP_AFTER, exact=True)
    theirs = weights_of(plain)
    same = sum(torch.equal(theirs[name], tensor) for name, tensor in weights_of(whole).items())
    report(Row("without the key: tensors that equal the others'", f"{same} of {len(theirs)}"))
    seconds = [sum(row["step_time"] for row in metrics_of(run)[1:]) for run in (plain, whole)]
    report(Row("seconds of its updates, without and with the key", f"{seconds[0]:.2f}, {seconds[1]:.2f}"))


def equal_tensors(report: Report, what: str, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Report how many tensors are the other training's, bit for bit: all have to be."""
    same, count = sum(torch.equal(ours[name], theirs[name]) for name in theirs if name in ours), len(theirs)
    equals(report, f"{what}: tensors that equal the other training's", f"{same} of {count}", f"{count} of {count}")


def adapters(scratch: Path, report: Report) -> None:
    """Train LoRA adapters, on a base of 16 and, where bitsandbytes is installed, of 4 bits: the model at the end is the
    base and the adapter's product."""
    work, data = small(steps=3), scratch / "workload"
    write(work, data)
    for name, keys in (("LoRA", {}), ("LoRA, 4 bits", {"model.load_in_4bit": True})):
        if keys and find_spec("bitsandbytes") is None:
            report(Row(name, "bitsandbytes is not installed"))
            continue
        run = scratch / name.replace(", ", "-").replace(" ", "-")
        # At the default rate, three updates move a base by less than the rounding of bfloat16.
        keys = keys | {"model.use_peft": True, "train.learning_rate": 1e-2}
        run_directory(work, data, run, {"precision": PRECISION, "keys": keys})
        equals(report, f"{name}: status", train(run).status, 0)
        adapter, merged = weights_of(run, run_files.ADAPTER), weights_of(run)
        if not adapter or not merged:
            report(Row(f"{name}: adapter and model", "none", "there", False))
            continue
        base = _held_base(data / "model", in_4bit=bool(keys.get("model.load_in_4bit")))
        config = json.loads((run / "training" / run_files.ADAPTER / "adapter_config.json").read_text())
        scale, without, bases, changes = config["lora_alpha"] / config["r"], [], [], []
        for key in (key for key in adapter if key.endswith("lora_A.weight")):
            place = key.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
            changes.append(scale * adapter[key.replace("lora_A", "lora_B")].float() @ adapter[key].float())
            without.append(merged[place].float() - changes[-1])
            bases.append(base[place].float())
        bound = 1e-2  # of bfloat16, in which the base is held
        size = (sum(x.norm() ** 2 for x in changes) / sum(x.norm() ** 2 for x in bases)) ** 0.5
        found = f"{size:.2f}"  # so large that its absence would show in the next row
        report(Row(f"{name}: B A, relative to the base", found, f"more than {2 * bound:g}", bool(size > 2 * bound)))
        at_most(report, f"{name}: merged model without B A, from the base", distance(without, bases), bound)
        at_most(report, f"{name}: engine from trainer, probe", _drift(run), 0.1 if ON_GPU else 1e-3)


def _held_base(folder: Path, *, in_4bit: bool) -> dict[str, Tensor]:
    """The base's weights by name; those that a training holds in 4 bits as their codes stand for them."""
    if not in_4bit:
        return _tensors(folder)
    dtype = torch.bfloat16 if PRECISION == "bf16" else torch.float32
    model = load_model(folder, dtype=dtype, device="cuda" if ON_GPU else "cpu", in_4bit=True)
    return {name: dequantised(parameter).detach().cpu() for name, parameter in model.named_parameters()}


def eight_bits(scratch: Path, report: Report) -> None:
    """Train with moments of 8 bits, on the device and in the host's memory, to the same weights, bit for bit."""
    work, data = small(steps=3), scratch / "workload"
    write(work, data)
    found = []
    for offload in ("none", "optimizer"):
        run = scratch / offload
        keys = {"train.optim": "adamw_8bit", "train.offload": offload, "train.deterministic": True}
        run_directory(work, data, run, {"precision": PRECISION, "keys": keys})
        equals(report, f"moments of 8 bits, offload {offload}: status", train(run).status, 0)
        found.append(weights_of(run))
    equal_tensors(report, "moments of 8 bits, offloaded", *reversed(found))


def hybrid(scratch: Path, report: Report) -> None:
    """Train a Qwen3.5 with the kernels of flash-linear-attention and causal-conv1d, and on the same completions with
    transformers' own code in Python: log-probabilities and the first gradient agree."""
    work, data = small(steps=3), scratch / "workload"
    write(work, data)
    _write_hybrid(work, data / "model")
    kernels, python = scratch / "kernels", scratch / "python"
    run_directory(work, data, kernels, {"precision": PRECISION})
    recorded = {"rollout.recording": str(kernels)}
    run_directory(work, data, python, {"precision": PRECISION, "engine": "recorded", "keys": recorded})
    for run, program in ((kernels, None), (python, ["-c", WITHOUT_KERNELS])):
        done = train(run, program)
        equals(report, f"{run.name}: status", done.status, 0)
        names = {*re.findall(r"`(\w+)` is falling back", done.said)}
        found = ", ".join(sorted(names)) or "none"
        wanted = "none" if run == kernels else "some"
        report(Row(f"{run.name}: functions without a kernel", found, wanted, (wanted == "some") == bool(names)))
        report(Row(f"{run.name}: seconds per update", f"{median(row['step_time'] for row in metrics_of(run)):.3f}"))
    ours, theirs = (metrics_of(run)[0] for run in (kernels, python))
    for run, row in (("kernels", ours), ("python", theirs)):
        apart = row["sampling/sampling_logp_difference/mean"]
        at_most(report, f"{run}: log-probabilities from the engine's with kernels", apart, 0.05 if ON_GPU else 1e-4)
    away = abs(ours["grad_norm"] - theirs["grad_norm"]) / theirs["grad_norm"]
    at_most(report, "gradient norm of the first update, relative", away, NOISE)


def _write_hybrid(work: Workload, folder: Path) -> None:
    """Put a Qwen3.5 of the workload's sizes in the place of its model."""
    heads, widths = ("linear_num_key_heads", "linear_num_value_heads"), ("linear_key_head_dim", "linear_value_head_dim")
    config = AutoConfig.from_pretrained(folder).to_dict()
    sizes: dict[str, Any] = {name: config[name] for name in SIZES} | dict.fromkeys(heads, work.heads)
    sizes |= {"head_dim": work.hidden // work.heads} | dict.fromkeys(widths, work.hidden // work.heads)
    sizes |= {"layer_types": ["linear_attention", "full_attention"] * (work.layers // 2)}
    generation = GenerationConfig.from_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen3_5_text"](**sizes), dtype=torch.float32)
    model.generation_config = generation
    model.save_pretrained(folder)


def _drift(run: Path) -> float:
    return (
        max(row.get("sampling/sync_drift", float("inf")) for row in metrics_of(run))
        if metrics_of(run)
        else float("inf")
    )


def processes(scratch: Path, report: Report) -> None:
    """Check that two training processes take the same step as one and, if sharded, can also be stopped."""
    if ON_GPU and torch.cuda.device_count() < 2:
        report(Row("two processes", "needs two GPUs"))
        return
    work, data = small(), scratch / "workload"
    write(work, data)
    first = []
    for count in (1, 2):
        run = scratch / f"processes-{count}"
        run_directory(work, data, run, {"precision": PRECISION, "processes": count})
        train(run, _program(count))
        first.append(metrics_of(run)[0])
    for metric in ("grad_norm", "entropy"):
        one, two = (row[metric] for row in first)
        away = abs(two - one) / max(abs(one), 1e-6)
        at_most(report, f"{metric} of the first update, relative", away, 1e-4 if TINY else 2e-2)
    run = scratch / "sharded"
    run_directory(work, data, run, {"precision": PRECISION, "processes": 2, "sharding": "full", "keys": KEPT})
    stopped_and_continued(report, run, work, _program(2))


def _program(count: int) -> list[str]:
    """Arguments of `python` that train in this many processes, without supervision."""
    from tasks.processes.machine import free_port

    port = str(free_port())
    meeting = ["--nnodes", "1", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", port]
    return TRAIN if count == 1 else ["-m", "tasks.processes.ranks", *meeting, "--nproc-per-node", str(count), *TRAIN]
