"""How the processes of a training, and of the evaluation of a sharded model, are started."""

from __future__ import annotations

import os
from pathlib import Path

from grpo_core.config.run import RunConfig
from grpo_core.config.training import TrainConfig

LAUNCH = Path(__file__).with_name("accelerate.yaml")
ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}  # by which a user sets up torch's allocator


def launcher(train: TrainConfig) -> list[str]:
    """Arguments of `python` that start the configured number of processes, whatever the user's Accelerate configuration
    says.

    Empty for one process: the launcher would import torch before it starts the process, and do nothing else.
    """
    if train.num_processes == 1:
        return []
    return [
        *("-m", "accelerate.commands.launch", "--config_file", str(LAUNCH)),
        *("--num_processes", str(train.num_processes), "--mixed_precision", "no"),
        *("--num_cpu_threads_per_process", _threads(train)),
    ]


def process_environment(config: RunConfig) -> dict[str, str]:
    """Variables of the training's processes: one process gets those that Accelerate's launcher would set, several get
    the one that lets the launcher start them without a GPU (gloo).

    On a GPU, the allocator's segments grow, since every batch has another length. Not with ipc: memory in such segments
    is shared in another way, which has not been tried. Page-locked memory of the host, for what is offloaded, is not
    rounded up to a power of two, which may be twice as much.
    """
    train, environment = config.train, {}
    settings = ["expandable_segments:True"] * (config.rollout.vllm_weight_transfer != "ipc")
    settings += ["pinned_max_round_threshold_mb:1"] * (train.offload != "none")
    if settings and not ALLOCATOR & os.environ.keys():
        environment["PYTORCH_CUDA_ALLOC_CONF"] = ",".join(settings)
    if train.num_processes == 1:
        return environment | {"ACCELERATE_MIXED_PRECISION": "no", "OMP_NUM_THREADS": _threads(train)}
    import torch

    return environment if torch.cuda.is_available() else environment | {"ACCELERATE_USE_CPU": "true"}


def _threads(train: TrainConfig) -> str:
    """CPU threads per process."""
    return os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // train.num_processes)))
