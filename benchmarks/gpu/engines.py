"""vLLM: in the training process and as a server. Weights, log-probabilities, stop and resume, sentences, speed; and the
whole pipeline with every engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.report import ON_GPU, PRECISION, TINY, Report, Row, at_most, equals, real, small
from benchmarks.gpu.trainings import KEPT, metrics_of, nothing_left, stopped_and_continued, train
from benchmarks.gpu.with_vllm_options import OPTIONS, with_options
from benchmarks.side_ours import run_directory
from benchmarks.workload import Workload, write
from grpo_core.rollout.loading import fallbacks
from grpo_core.rollout.types import Request, Sampling

TRAIN = ("-m", "benchmarks.gpu.with_vllm_options")
SHARE = {"rollout.gpu_memory_utilization": 0.08} if "kv_cache_memory_bytes" in OPTIONS else {}
DRIFT = 0.1 if ON_GPU else 1e-3  # mean distance of log-probabilities between engine and trainer
SECRET = "of-this-check"
NOTHING = 0.001  # share of a GPU in which no engine starts
LONGEST = 240.0  # seconds that a server may take to start
# A trainer that tells a server of new weights and does not send them.
STALE = """
import sys
from grpo_core.rollout.vllm import send_weights
own = send_weights.Sender.send
send_weights.Sender.send = lambda self, server, weights: own(self, server, weights) if weights.version <= 2 else None
sys.argv = ["grpo_core.train", sys.argv[1]]
from grpo_core.train import main
main()
"""


def _work(**changes: Any) -> Workload:
    return small(**changes) if TINY else small(**{"kv_heads": 2, "completion": 64} | changes)


def _run(scratch: Path, name: str, work: Workload, engine: str = "vllm", **keys: Any) -> Path:
    """A run directory, whose inputs are written with the first."""
    if not (scratch / "workload").exists():
        write(work, scratch / "workload")
    settings = {"precision": PRECISION, "engine": engine, "keys": SHARE | keys}
    run_directory(work, scratch / "workload", scratch / name, settings)
    return scratch / name


def gap(scratch: Path, report: Report) -> None:
    """Compare log-probabilities of sampled completions with the trainer's, before and after the weights move, also of a
    model with logits as wide as a real one's; an engine that keeps old weights must be noticed."""
    from grpo_core.errors import TrainingError
    from grpo_core.rollout.vllm.colocated_engine import VLLMEngine
    from grpo_core.rollout.vllm.shared_weights import unshare_memory
    from grpo_core.training.session import load_session
    from grpo_core.training.state import TrainingState
    from grpo_core.training.weight_sync import begin_probing, sync_weights

    work = _work()
    began = time.perf_counter()
    with with_options():
        session: Any = load_session(_run(scratch, "run", work))
    report(Row("seconds to load trainer and engine", f"{time.perf_counter() - began:.0f}"))
    report(Row("what falls back", "; ".join(fallbacks(session.sampler.engine, session.policy)) or "nothing"))
    equals(report, "weights are the trainer's own memory", session.sampler.engine.shares_with is not None, True)
    head = session.sampler.engine.llm.llm_engine.vllm_config.model_config.head_dtype
    equals(report, "the engine's logits", head, torch.float32)
    begin_probing(session, session.sampler)
    at_most(report, "probe: the base's weights on both sides", session.sampler.probe.first_drift, DRIFT)
    first = _beside_trainer(report, session, work, "base")
    again = _beside_trainer(report, session, work, "again")
    equals(report, "the same seeds give the same completions", again == first, True)

    def move(scale: float = 0.02) -> None:
        with torch.no_grad():
            for parameter in session.policy.master.parameters():
                parameter.add_(torch.randn_like(parameter) * scale * parameter.std().nan_to_num(0.0))
        session.policy.refresh()

    for number in (1, 2):
        move()
        at_most(
            report,
            f"probe after update {number}",
            sync_weights(session, session.sampler, TrainingState(updates=number)),
            DRIFT,
        )
    with torch.no_grad():
        session.policy.master.model.norm.weight.mul_(6.0)
    session.policy.refresh()
    sync_weights(session, session.sampler, TrainingState(updates=3))
    moved = _beside_trainer(report, session, work, "moved, logits six times as wide")
    equals(report, "completions change with the weights", moved != first, True)
    if session.sampler.engine.shares_with is not None:
        unshare_memory(session.policy.model)
    noticed = "not in 3 updates"
    with mock.patch.object(VLLMEngine, "sync_weights", lambda *_: "shared"):
        try:
            for number in (4, 5, 6):
                move()
                sync_weights(session, session.sampler, TrainingState(updates=number))
        except TrainingError as error:
            noticed = str(error)
    report(Row("planted, old weights: noticed", noticed[:160], "an error", noticed != "not in 3 updates"))
    session.sampler.engine.close()


def _beside_trainer(report: Report, session: Any, work: Workload, what: str) -> list[list[int]]:
    """Sample, and score the completions by the trainer; returns their ids."""
    from grpo_core.model.sequences import Sequences, pad

    prompts = session.prompts.ids
    requests = [Request(ids, work.group, seed=1000 * number) for number, ids in enumerate(prompts)]
    stream = session.sampler.engine.generate(requests, Sampling(work.completion, temperature=1.0))
    answers = {number: found for done in stream for number, found in done}
    said = [(number, completion) for number in range(len(prompts)) for completion in answers[number]]
    sequences = Sequences(
        pad([prompts[number] + completion.ids for number, completion in said], torch.int64),
        torch.tensor([len(prompts[number]) for number, _ in said]),
        torch.tensor([len(completion.ids) for _, completion in said]),
        torch.tensor([number for number, _ in said]),
    )
    policy = session.policy.whole(1.0)
    with torch.no_grad():
        logprobs = policy(policy.prepare(sequences))[0].cpu()
    away = torch.cat([torch.tensor(one.logprobs) - logprobs[row, : len(one.ids)] for row, (_, one) in enumerate(said)])
    spread = f"99 % {away.abs().quantile(0.99):.1e}, largest {away.abs().max():.1e}"
    report(Row(f"{what}: samples' log-probabilities from the trainer's", spread))
    report(Row(f"{what}: variance of the ratios", f"{away.neg().exp().var():.1e}"))
    at_most(report, f"{what}: their mean distance", away.abs().mean().item(), DRIFT)
    return [completion.ids for _, completion in said]


def colocated(scratch: Path, report: Report) -> None:
    """Stop and continue a training with vLLM in its process."""
    work = _work(steps=6)
    run = _run(scratch, "run", work, **KEPT)
    stopped_and_continued(report, run, work, TRAIN)
    said = (run / "said").read_text()
    equals(report, "CUDA's own errors in the output", [line for line in said.splitlines() if "CUDA Error" in line], [])
    _say_hand_over(report, run, "shared")


def adapter(scratch: Path, report: Report) -> None:
    """Train LoRA with vLLM in the process: the adapter alone is handed over, and vLLM's kernels compute it."""
    run = _run(scratch, "run", _work(steps=3), **{"model.use_peft": True, "train.learning_rate": 1e-2})
    equals(report, "status", train(run, TRAIN).status, 0)
    _say_hand_over(report, run, "adapter")


def too_little_memory(scratch: Path, report: Report) -> None:
    """Give vLLM more of the GPU than there is, and less than it needs: a sentence names the key."""
    for share in (0.99, NOTHING) if ON_GPU else (0.3,):
        run = _run(scratch, f"{share}", _work(steps=2), **{"rollout.gpu_memory_utilization": share})
        found = train(run, TRAIN)
        last = found.said.strip().splitlines()[-1] if found.said.strip() else ""
        named = "gpu_memory_utilization" in last and "Traceback" not in found.said
        named = named or (found.status == 0 and share > NOTHING)
        report(Row(f"share {share}: status {found.status}", last[:160], "a sentence that names the key", named))


def _say_hand_over(report: Report, run: Path, expected: str) -> None:
    said = (run / "said").read_text()
    how = next((line for line in said.splitlines() if "weights reach the engine" in line), "not said")
    report(Row("hand-over", how, expected, f": {expected}" in how))
    rows = metrics_of(run)
    if rows:
        at_most(report, "probe, the largest of the updates", max(row["sampling/sync_drift"] for row in rows), DRIFT)


@contextmanager
def _server(report: Report, config: Path, log: Path) -> Iterator[str]:
    """A server as the project starts it; yields its address, and ends it."""
    from tasks.processes.machine import free_port

    url = f"http://127.0.0.1:{free_port()}"
    options = [part for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", json.dumps(value))]
    command = [sys.executable, "-m", "grpo_core.rollout.vllm.serve", str(config), "--port", url.rpartition(":")[2]]
    began = time.perf_counter()
    with log.open("w") as said:
        process = subprocess.Popen([*command, *options], stdout=said, stderr=said, start_new_session=True)
    try:
        request = urllib.request.Request(f"{url}/health", headers={"Authorization": f"Bearer {SECRET}"})
        while True:
            try:
                urllib.request.urlopen(request, timeout=2)
                break
            except OSError:
                if process.poll() is not None or time.perf_counter() - began > LONGEST:
                    raise RuntimeError(f"the server does not start:\n{log.read_text()[-6000:]}") from None
                time.sleep(0.3)
        report(Row("seconds until the server is up", f"{time.perf_counter() - began:.0f}"))
        yield url
    finally:
        print(log.read_text()[-3000:], flush=True)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            report(Row("the server ends by SIGTERM", "not in 20 s", "ends", False))
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        nothing_left(report, process.pid)


def server(scratch: Path, report: Report) -> None:
    """Train with a server on the trainer's GPU: weights by ipc (on a CPU by shared memory). A server that is told of
    new weights and does not get them must be noticed."""
    os.environ["GRPO_VLLM_SECRET"] = SECRET
    way = "ipc" if ON_GPU else "shared_memory"
    keys: dict[str, Any] = {"rollout.vllm_weight_transfer": way}
    work = _work(steps=3)
    served = _run(scratch, "served", work, "vllm-server", **keys)
    with _server(report, served / "config.toml", scratch / "server.log") as url:
        keys["rollout.vllm_server_base_urls"] = [url]
        run = _run(scratch, "run", work, "vllm-server", **keys)
        equals(report, "training with the server: status", train(run).status, 0)
        _say_hand_over(report, run, f"sent by {way}")
        stale = _run(scratch, "stale", _work(steps=8), "vllm-server", **keys, **{"train.learning_rate": 1e-3})
        found = train(stale, ("-c", STALE))
        noticed = found.status == 1 and "does not have the trainer's weights" in found.said
        last = found.said.strip().splitlines()[-1:]
        report(Row("planted, old weights: noticed", f"status {found.status}: {last}"[:160], "an error", noticed))
    if torch.cuda.device_count() < 2:
        report(Row("weights by nccl", "needs two GPUs"))


def speed(scratch: Path, report: Report) -> None:
    """Measure whole steps of 0.5B with vLLM in the process, as `measured.end_to_end` does with the transformers
    engine."""
    from benchmarks.gpu.measured import measure

    with with_options():
        measure(report, scratch, real("0.5B", mode="generate", steps=4, warm_up=1), engine="vllm")


def pipeline(scratch: Path, report: Report) -> None:
    """Run the whole pipeline by `grpo run` with every engine, also with hand-over of the adapter alone."""
    from grpo_core.config.files import dump_config, parse_config

    work = small()
    write(work, scratch / "train")
    write(small(seed=1), scratch / "eval")
    one_gpu = torch.cuda.device_count() == 1
    for engine, lora in (("transformers", False), ("vllm", False), ("vllm", True), ("vllm-server", False)):
        name = f"{engine}{'-lora' if lora else ''}"
        rollout = {"engine": engine, "num_generations": work.group, "max_completion_length": work.completion}
        if engine == "vllm-server" and one_gpu:  # the server takes a part of the training's
            rollout["vllm_weight_transfer"] = "ipc"
        values = {
            "name": name,
            "model": {"name_or_path": str(scratch / "train" / "model"), "use_peft": lora},
            "data": {part: str(scratch / part / "prompts.parquet") for part in ("train", "eval")},
            "rewards": [{"function": "benchmarks.workload:spread"}],
            "rollout": rollout,
            "train": {
                "mixed_precision": PRECISION,
                "per_device_train_batch_size": work.completions,
                "max_steps": work.steps,
                "learning_rate": 1e-4,
            },
        }
        config = scratch / f"{name}.toml"
        config.write_text(dump_config(parse_config(values)))
        began = time.perf_counter()
        command = [sys.executable, "-m", "flows.cli.main", "run", str(config)]
        status = subprocess.run(command, env=os.environ | {"GRPO_STORAGE": str(scratch / "storage")}).returncode
        seconds = time.perf_counter() - began
        report(Row(f"{name}: grpo run", f"status {status}, {seconds:.0f} s", "status 0", status == 0))
        rows = metrics_of(scratch / "storage" / "runs" / name)
        if rows:
            at_most(report, f"{name}: probe", max(row["sampling/sync_drift"] for row in rows), DRIFT)
            apart = median(row["sampling/sampling_logp_difference/mean"] for row in rows)
            report(Row(f"{name}: log-probabilities of samples from the trainer's", f"{apart:.1e}"))
