"""Starts a training's processes, and those that evaluate a sharded model; with vLLM servers of a scheduler's job."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from logging import Logger, LoggerAdapter
from pathlib import Path
from typing import Any, Literal

from grpo_core import run_files
from grpo_core.config.run import RunConfig
from grpo_core.config.training import TrainConfig
from grpo_core.rollout.vllm.secret import SECRET
from grpo_core.rollout.vllm.serve import ADDRESSES
from grpo_core.system.memory import ALLOCATOR
from grpo_core.system.progress import MACHINES, RANKS
from grpo_core.system.torch_releases import EXACT_PINNED_MEMORY
from tasks.processes.launchers.kubernetes import kubernetes
from tasks.processes.launchers.machines import Launcher, Machine, local
from tasks.processes.launchers.slurm import slurm
from tasks.processes.launchers.ssh import ssh
from tasks.processes.restarting import AGAIN
from tasks.processes.run import ProcessError, run_process, run_together
from tasks.processes.stacks import WATCHED
from tasks.processes.watchdog import watchdog

LAUNCHERS: dict[str, Launcher] = {"kubernetes": kubernetes, "local": local, "slurm": slurm, "ssh": ssh}
RETURN_SECONDS = 600.0  # to wait for a lost machine before the processes start again without it


def launch(
    config: RunConfig,
    command: Sequence[str],
    on_line: Callable[[str], None],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    patience: float = 0.0,
) -> None:
    """Run `python COMMAND` in the configured number of processes, on the configured machines, to the end of all.

    `folder`: the stage's, in the run's directory; each of several machines has its output there too, in NAME.log.
    `patience`: seconds to wait for missing machines. Raises ProcessError, which names the machine, if a process fails,
    and HangError if one hangs.
    """
    variables = process_environment(config) | dict(environment or {}) | {WATCHED: str((folder / RANKS).absolute())}
    train = config.train
    if config.launch.launcher == "local" and train.num_processes == 1:
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count() or 1))}
        with watchdog(folder / RANKS) as check:  # without torchrun, which would only import torch first
            return run_process(command, on_line, variables | threads, check=check)
    with (
        watchdog(folder / RANKS) as check,
        LAUNCHERS[config.launch.launcher](config, folder, patience, on_line) as machines,
        job_servers(machines[train.num_machines :], folder) as (servers, addresses),
        ExitStack() as stack,
    ):
        training = machines[: train.num_machines]
        master, several = training[0], len(training) > 1
        names = {name: f"vllm-server-{number}-{name}.log" for number, name in enumerate(servers)}
        names |= {machine.name: f"{machine.name}.log" for machine in training if several}
        logs = {name: stack.enter_context((folder / file).open("a")) for name, file in names.items()}

        def on_output_line(name: str, line: str) -> None:
            if name in logs:
                logs[name].write(line + "\n")
                logs[name].flush()
                line = f"{name}: {line}"
            if name not in servers or line.endswith(AGAIN):
                on_line(line)

        commands = {
            machine.name: [
                *machine.command,
                *("-m", "tasks.processes.ranks"),
                *torchrun(train, master.address, master.port, number),
                *command,
            ]
            for number, machine in enumerate(training)
        }
        if several:
            variables[MACHINES] = json.dumps([machine.name for machine in training])
        environments = dict.fromkeys(commands, variables | addresses) | dict.fromkeys(servers, addresses)
        grace = max(machine.grace for machine in machines)
        return run_together(
            commands | servers, on_output_line, environments, grace, check=check, endless=servers.keys()
        )


@contextmanager
def job_servers(machines: Sequence[Machine], folder: Path) -> Iterator[tuple[dict[str, list[str]], dict[str, str]]]:
    """Give the command of each machine's vLLM server, by the machine's name, and the environment variables by which the
    training finds the servers; both empty without machines. `folder`: the stage's, in the run's directory.

    The machines belong to the scheduler's job like the others: if one is lost, all are ended, and the training starts
    again as a new job. A server that dies is started again on its machine (`tasks.processes.restarting`), at the same
    address.
    """
    if not machines:
        yield {}, {}
        return
    addresses = folder.absolute() / "vllm-servers"
    addresses.write_text("\n".join(url(machine.address, machine.port) for machine in machines))
    commands = {
        machine.name: [
            *machine.command,
            *("-m", "tasks.processes.restarting"),
            *serve(folder.absolute().parent, machine.address, machine.port, 0),
        ]
        for machine in machines
    }
    try:
        yield commands, {ADDRESSES: str(addresses), SECRET: secrets.token_hex(16)}
    finally:
        addresses.unlink(missing_ok=True)


def serve(run: Path, address: str, port: int, first_gpu: int) -> list[str]:
    """Arguments with which `python` serves the run's model."""
    options = ["--host", address, "--port", str(port), "--first-gpu", str(first_gpu)]
    return ["-m", "grpo_core.rollout.vllm.serve", str(run / run_files.CONFIG), *options]


def url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def launch_with_restarts(
    config: RunConfig,
    command: Sequence[str],
    log: Logger | LoggerAdapter[Any],
    folder: Path,
    environment: Mapping[str, str],
    on_line: Callable[[str], None] | None = None,
    after: Callable[[ProcessError], Literal["done", "again", "restart"]] = lambda error: "restart",
) -> None:
    """Call `launch`, and again up to train.max_restarts times if a process was killed or its machine is gone. `after`
    is asked first: is the work done all the same, does it go on, or does this count as a restart?"""
    most, restarts, patience = config.train.max_restarts, 0, 0.0
    while True:
        try:
            return launch(config, command, on_line or log.info, folder, environment, patience)
        except ProcessError as error:
            answer, patience = after(error), RETURN_SECONDS
            if answer == "done":
                return None
            if answer == "restart" and (restarts == most or not error.restartable):
                raise
            if answer == "restart":
                restarts += 1
                log.warning("restart %d of %d (train.max_restarts): %s", restarts, most, error)


def torchrun(train: TrainConfig, address: str, port: int, number: int = 0) -> list[str]:
    """Arguments of `tasks.processes.ranks` for the processes of machine `number`; those of all machines meet at
    `address`."""
    return [
        *("--nnodes", str(train.num_machines), "--node-rank", str(number)),
        *("--nproc-per-node", str(train.processes_per_machine)),
        *("--master-addr", address, "--master-port", str(port)),
    ]


def process_environment(config: RunConfig) -> dict[str, str]:
    """Environment variables of the training's processes, on every machine.

    On a GPU, the allocator's segments grow, since every batch has another length, except with ipc: memory in such
    segments is shared in another way, which has not been tried. Page-locked host memory for offloaded state is not
    rounded up to a power of two, which might double it, where torch can be told so.
    """
    environment = {"ACCELERATE_MIXED_PRECISION": "no"}  # the policy has its own copy in bfloat16
    settings = ["expandable_segments:True"] * (config.rollout.vllm_weight_transfer != "ipc")
    settings += EXACT_PINNED_MEMORY if config.train.offload != "none" else []
    if settings and not ALLOCATOR & os.environ.keys():
        environment["PYTORCH_CUDA_ALLOC_CONF"] = ",".join(settings)
    return environment
