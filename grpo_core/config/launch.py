"""`[launch]`: how a training's processes are started on its machines. No result follows from it."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from grpo_core.config.base import Section

_NAME = "[A-Za-z0-9_][A-Za-z0-9_.-]*"
Destination = Annotated[str, Field(pattern=rf"^(({_NAME}@)?{_NAME}|ssh://({_NAME}@)?{_NAME}(:[0-9]+)?)$")]


def host_name(destination: str) -> str:
    """The host without the user, as a name that a file can have."""
    return re.sub(r"^(ssh://)?([^@]*@)?", "", destination).replace(":", "-")


class LaunchConfig(Section):
    launcher: Literal["local", "ssh"] = "local"
    """What starts the processes. `local`: all of them on this machine. `ssh`: on `hosts`, by this machine's `ssh`."""
    hosts: list[Destination] = Field(default_factory=list)
    """Machines for `ssh`, each as HOST, USER@HOST or ssh://USER@HOST:PORT. The first train.num_machines of them that
    answer are used; those beyond are spare."""
    server_hosts: list[Destination] = Field(default_factory=list)
    """vllm-server: machines for the servers that a training starts, reached by `ssh`. The first
    rollout.vllm_num_servers of them that answer get one each; those beyond are spare. A server on one of `hosts` takes
    the GPUs after the training's. Default: this machine."""
