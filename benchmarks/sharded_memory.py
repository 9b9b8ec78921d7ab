"""Compares the simulated memory of a sharded update with the forecast. Every tensor is made, but none has memory.

    python -m benchmarks.sharded_memory [--models 7B 14B] [--gpus 8 16] [--tiny]

The sharding, the policy's pass and AdamW are the training's own. The tensors are torch's FakeTensors, the process group
is torch's `fake` one, and torch's FSDPMemTracker counts what FSDP2 holds at the peak. GPU kernels of the output layer
allocate as usual but compute nothing. The forecast is that of `grpo plan` without an engine.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.command import parse
from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.model import fused_logprobs, logprobs, sharded
from grpo_core.model import policy as policies
from grpo_core.model.capabilities import use_attention
from grpo_core.model.sequences import Sequences
from grpo_core.planning.hardware import Gpu
from grpo_core.planning.memory import GIB, PlannedRun, peak_memory
from grpo_core.planning.plan import make_plan, plan_inputs
from grpo_core.planning.shapes import PromptLengths, model_shape
from grpo_core.training import optimizer as optimizers
from tests.conftest import config_values
from tests.qwen import QWEN

PROMPT, COMPLETION, PER_PASS = 256, 512, 4
MODELS = ("7B", "14B", "32B", "72B")
GPUS = (8, 16, 32, 64)
PASSES = 2  # the gradients of the first are held during the second
NOT_OF_THE_UPDATE = {"engine_weights", "kv_cache", "reference"}


def run_config(processes: int, *, recomputed: bool, offload: str = "none") -> RunConfig:
    """Configuration: bf16, all weights trained, 4 completions of 512 tokens after prompts of 256 per pass."""
    values = {"sharding": "full", "num_processes": processes, "mixed_precision": "bf16", "engine": "vllm"}
    values |= {"per_device_train_batch_size": PER_PASS, "num_generations": 4, "max_completion_length": COMPLETION}
    values |= {"gradient_accumulation_steps": PASSES, "gradient_checkpointing": recomputed, "offload": offload}
    return parse_config(config_values(Path("model"), Path("data"), **values))


def forecast(model: dict[str, Any], processes: int, *, recomputed: bool, offload: str = "none") -> float:
    """Bytes of weights, gradients, optimizer and passes, as `grpo plan` forecasts them."""
    config = run_config(processes, recomputed=recomputed, offload=offload)
    plan, lengths = make_plan(plan_inputs(config, 1000)), PromptLengths(PROMPT, PROMPT, "given")
    parts = peak_memory(PlannedRun(config, plan, model_shape(model), lengths, Gpu("GPU")))["parts_gib"]
    return GIB * sum(size for part, size in parts.items() if part not in NOT_OF_THE_UPDATE)


def simulated(model: dict[str, Any], processes: int, *, recomputed: bool, offload: str = "none") -> dict[str, int]:
    """Simulate an update; returns one process's bytes at the peak, by torch's kinds. "Total" is their sum."""
    config = run_config(processes, recomputed=recomputed, offload=offload)
    dist.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (processes,))
        with mock.patch.object(sharded, "shard_mesh", lambda **_: mesh), _as_on_a_gpu():
            return _peak_of_update(model, config)
    finally:
        dist.destroy_process_group()


def _peak_of_update(model: dict[str, Any], config: RunConfig) -> dict[str, int]:
    fake = FakeTensorMode()
    with fake:
        master = AutoModelForCausalLM.from_config(Qwen2Config(**model), dtype=torch.float32).eval()
        shard = sharded.sharding(config.train, frozen=False)
        assert shard is not None
        shard(master)
        optimizer = optimizers.make_optimizer(master, config.train)
        policy = policies.Policy(master, 1.0, bf16=True, gradient_checkpointing=config.train.gradient_checkpointing)
    rows = torch.arange(PER_PASS)
    prompts, completions = torch.full_like(rows, PROMPT), torch.full_like(rows, COMPLETION)
    ids = torch.zeros(PER_PASS, PROMPT + COMPLETION, dtype=torch.int64)
    inputs = _in(fake, policy.prepare(Sequences(ids, prompts, completions, rows)))
    tracker = FSDPMemTracker(master, optimizer)
    with fake, tracker:
        for number in range(PASSES):
            chosen, _ = policy(inputs)
            chosen.sum().backward()
            if number < PASSES - 1:
                tracker.reset_mod_stats()
        optimizer.step()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {getattr(kind, "value", kind): size for kind, size in peak.items()}


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Compute as on a GPU: flash attention over sequences, and kernels that write gradients over logits. Offloaded
    tensors go to another device, which is not counted."""

    def packed(model: Any, kinds: Any, **_: Any) -> tuple[str, str]:
        use_attention(model.model)
        return "varlen", ""

    def statistics(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
        return torch.empty(4, len(targets))

    def product(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.empty(len(hidden), len(weight))

    nothing: dict[str, Any] = {"_compute_gradient": lambda *_: None, "_add_product": lambda *_: None}
    with (
        mock.patch.object(logprobs, "FUSED", ("cpu",)),
        mock.patch.object(optimizers, "HOST", torch.device("meta")),
        mock.patch.multiple(fused_logprobs, float32_product=product, _statistics=statistics, **nothing),
        mock.patch.multiple(policies, make_packable=packed, plain_output_layer=lambda it: it.get_output_embeddings()),
    ):
        yield


def _in(fake: FakeTensorMode, value: Any) -> Any:
    """Convert the tensors in nested dataclasses to tensors without memory."""
    if isinstance(value, torch.Tensor):
        return fake.from_tensor(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _in(fake, getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.sharded_memory", description="GiB per GPU of a sharded update, simulated beside forecast."
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="sizes of Qwen2.5")
    parser.add_argument("--gpus", nargs="+", type=int, default=GPUS, help="processes that share a model")
    arguments = parse(parser)
    print("model   GPUs  activations  moments  simulated GiB  forecast GiB  ratio")
    for size in arguments.models:
        model = QWEN[size] | ({"num_hidden_layers": 1} if arguments.tiny else {})
        for processes in arguments.gpus:
            for recomputed, offload in ((False, "none"), (True, "none"), (True, "optimizer")):
                found = simulated(model, processes, recomputed=recomputed, offload=offload)["Total"]
                expected = forecast(model, processes, recomputed=recomputed, offload=offload)
                how, where = "recomputed" if recomputed else "kept", "GPU" if offload == "none" else "host"
                figures = f"{found / GIB:13.1f} {expected / GIB:13.1f} {expected / found:6.2f}"
                print(f"{size:6} {processes:5}  {how:11}  {where:7} {figures}", flush=True)


if __name__ == "__main__":
    main()
