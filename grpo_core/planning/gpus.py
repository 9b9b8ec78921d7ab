"""The GPUs that a training takes together with the vLLM servers that it starts, and on which machines. Imports no
torch."""

from __future__ import annotations

from typing import Any

from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from grpo_core.planning.hardware import Gpu


def count_gpus(config: RunConfig, gpu: Gpu) -> dict[str, Any]:
    """GPUs of the training and of the servers that it starts, and where the servers are.

    Raises ConfigError if they are all on this machine and it has fewer.
    """
    train, rollout, hosts = config.train, config.rollout, config.launch.server_hosts
    each = rollout.vllm_tensor_parallel_size * rollout.vllm_data_parallel_size
    asked = f"rollout.vllm_num_servers={rollout.vllm_num_servers} with {each} each (vllm_tensor_parallel_size · "
    asked += "vllm_data_parallel_size)"
    needed = train.num_processes + rollout.server_gpus
    if not config.servers_elsewhere and gpu.per_machine is not None and needed > gpu.per_machine:
        raise ConfigError(
            f"train.num_processes={train.num_processes} and {asked} need {needed} GPUs, and this machine has "
            f"{gpu.per_machine}: lower one of these keys, or name other machines in launch.server_hosts"
        )
    where = f"the first of {', '.join(hosts)} that answer" if hosts else "this machine, after the training's"
    where = "further machines of the job, one each" if config.servers_in_job else where
    return {"training": train.num_processes, "servers": rollout.server_gpus, "how": f"{asked}, on {where}"}
