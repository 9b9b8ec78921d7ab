"""`[launch]`: how a training's processes are started on its machines. No result follows from it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from grpo_core.config.base import Section

if TYPE_CHECKING:
    from grpo_core.config.run import RunConfig

_NAME = "[A-Za-z0-9_][A-Za-z0-9_.-]*"
Destination = Annotated[str, Field(pattern=rf"^(({_NAME}@)?{_NAME}|ssh://({_NAME}@)?{_NAME}(:[0-9]+)?)$")]

# Options of sbatch that the launcher sets itself, or with which it could not follow the job.
OURS = {
    "array",
    "batch",
    "chdir",
    "clusters",
    "error",
    "export",
    "export-file",
    "help",
    "input",
    "job-name",
    "nodefile",
    "nodes",
    "no-requeue",
    "ntasks",
    "ntasks-per-node",
    "open-mode",
    "output",
    "parsable",
    "quiet",
    "requeue",
    "test-only",
    "uid",
    "gid",
    "usage",
    "version",
    "wait",
    "wrap",
}


def _check_option(option: str) -> str:
    """Return the option. Raises ValueError unless it is an option of sbatch that a configuration may set."""
    found = re.fullmatch(r"--([a-z][a-z0-9-]*)(=[^\x00-\x1f]*)?", option)
    if not found:
        raise ValueError(
            f"{option!r} is not an option of sbatch as --NAME or --NAME=VALUE; write --partition=gpu for -p gpu"
        )
    if any(name.startswith(found[1]) for name in OURS):  # sbatch takes the beginning of a name for the name
        raise ValueError(
            f"{option!r} is set by the launcher, or changes what it submits; leave it out (train.num_machines sets the "
            "number of nodes)"
        )
    return option


SbatchOption = Annotated[str, AfterValidator(_check_option)]


def host_name(destination: str) -> str:
    """The host without the user, as a name that a file can have."""
    return re.sub(r"^(ssh://)?([^@]*@)?", "", destination).replace(":", "-")


class LaunchConfig(Section):
    launcher: Literal["kubernetes", "local", "slurm", "ssh"] = "local"
    """What starts the processes. `local`: all of them on this machine. `ssh`: on `hosts`, by this machine's `ssh`.
    `slurm`: on the nodes of a job that the stage submits to Slurm and waits for.
    `kubernetes`: in the pods of a Job, one per machine."""
    hosts: list[Destination] = Field(default_factory=list)
    """Machines for `ssh`, each as HOST, USER@HOST or ssh://USER@HOST:PORT. The first train.num_machines of them that
    answer and are fit are used; those beyond are spare."""
    slurm: list[SbatchOption] = Field(default_factory=list)
    """Further options of `sbatch` for `slurm`, each as --NAME or --NAME=VALUE: the partition, GPUs per node, the time
    limit."""
    kubernetes: str = ""
    """YAML file with the Job for `kubernetes`. Its spec.template describes the pods: image, storage, GPUs. The file is
    read where the stage `train` runs."""
    server_hosts: list[Destination] = Field(default_factory=list)
    """vllm-server: machines for the servers that a training starts, reached by `ssh`. The first
    rollout.vllm_num_servers of them that answer and are fit get one each; those beyond are spare. A server takes GPUs
    that no other process of this project uses there. Default: this machine."""
    priority: int = Field(0, ge=-100, le=100)
    """Place among trainings that wait for GPUs: the higher priority first, then the run that was due first."""
    gpu_hour_price: float | None = Field(None, ge=0)
    """Price of one GPU for an hour, in any currency: reports, comparisons and MLflow then say what a run has cost."""


def check_placement(config: RunConfig) -> None:
    """Raises ValueError if the processes, or those that sample together, cannot be placed on the machines."""
    train, launch, rollout = config.train, config.launch, config.rollout
    together = rollout.vllm_tensor_parallel_size
    if rollout.may_share_processes and train.processes_per_machine % together:
        among = f" / train.num_machines={train.num_machines}" * (train.num_machines > 1)
        raise ValueError(
            f"rollout.vllm_tensor_parallel_size={together} with rollout.engine={rollout.engine!r}: that many "
            f"training processes of a machine sample together, and train.num_processes={train.num_processes}"
            f"{among} is not a multiple of it; change one of them, or set rollout.engine to 'vllm-server'"
        )
    if len({host_name(host) for host in launch.hosts}) < len(launch.hosts):
        raise ValueError(f"launch.hosts={launch.hosts} names a machine twice; name each once")
    if launch.launcher == "local" and train.num_machines > 1:
        raise ValueError(
            f"train.num_machines={train.num_machines} with launch.launcher='local', which starts processes on this "
            "machine only; set launch.launcher to 'slurm', or to 'ssh' and launch.hosts to the machines"
        )
    if launch.launcher == "ssh" and len(launch.hosts) < train.num_machines:
        raise ValueError(
            f"train.num_machines={train.num_machines} with launch.launcher='ssh' and launch.hosts={launch.hosts}: "
            "name at least as many hosts as machines"
        )
    if launch.launcher == "kubernetes" and not launch.kubernetes:
        raise ValueError(
            "launch.launcher='kubernetes' without launch.kubernetes; name a YAML file with a Job, such as the "
            "project's docs/how-to/kubernetes/training.yaml"
        )
    _check_servers(config)


def _check_servers(config: RunConfig) -> None:
    """Raises ValueError if the vLLM servers cannot be placed, or weights cannot be sent there."""
    train, launch, rollout = config.train, config.launch, config.rollout
    hosts, starts = launch.server_hosts, not rollout.vllm_server_base_urls
    if hosts and (rollout.engine != "vllm-server" or not starts):
        raise ValueError(
            f"launch.server_hosts={hosts} are for servers that a training starts, with engine='vllm-server' and "
            f"without vllm_server_base_urls; [rollout] has engine={rollout.engine!r} and "
            f"vllm_server_base_urls={rollout.vllm_server_base_urls}"
        )
    if rollout.engine != "vllm-server":
        return
    if train.sharding == "full" and train.num_machines > 1 and not config.model.use_peft:
        raise ValueError(
            "rollout.engine='vllm-server' with train.sharding='full' and "
            f"train.num_machines={train.num_machines}: whole weights are put together for servers from the memory of "
            "one machine, and each has a part of them; set train.sharding to 'hybrid', or rollout.engine to 'vllm'"
        )
    if starts and launch.launcher == "ssh" and not hosts:
        raise ValueError(
            f"rollout.engine='vllm-server' with launch.launcher={launch.launcher!r}: the servers would be started "
            "on this machine, where the others do not reach them; name machines for them in launch.server_hosts, "
            "or running servers in rollout.vllm_server_base_urls"
        )
    if len({host_name(host) for host in hosts}) < len(hosts):
        raise ValueError(f"launch.server_hosts={hosts} names a machine twice; name each once")
    if hosts and len(hosts) < rollout.vllm_num_servers:
        raise ValueError(
            f"rollout.vllm_num_servers={rollout.vllm_num_servers} with launch.server_hosts={hosts}: a machine gets "
            "one server; name as many machines, or raise rollout.vllm_data_parallel_size, the copies per server"
        )
    if config.servers_elsewhere and rollout.vllm_weight_transfer in ("ipc", "shared_memory"):
        raise ValueError(
            f"rollout.vllm_weight_transfer={rollout.vllm_weight_transfer!r} is for a server on the training's own "
            f"machine, and with launch.launcher={launch.launcher!r} and launch.server_hosts={hosts} servers are on "
            "others; set it to 'auto'"
        )
