"""vLLM servers on further machines of a scheduler's job: one per machine, for one start of the training's processes.

Their machines belong to the job like the others: if one is lost, all are ended, and the training starts again as a new
job. A server that dies is started again on its machine (`tasks.processes.restarting`), at the same address.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from grpo_core import run_files
from grpo_core.rollout.vllm.secret import SECRET
from grpo_core.rollout.vllm.serve import ADDRESSES
from tasks.processes.launchers.machines import Machine


@contextmanager
def job_servers(machines: Sequence[Machine], folder: Path) -> Iterator[tuple[dict[str, list[str]], dict[str, str]]]:
    """Give the command of each machine's server, by the machine's name, and the environment variables by which the
    training finds the servers; both empty without machines. `folder`: the stage's, in the run's directory."""
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
