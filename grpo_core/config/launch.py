"""`[launch]`: how a training's processes are started on its machines. No result follows from it."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from grpo_core.config.base import Section

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
