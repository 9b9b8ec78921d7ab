"""Machines reached by OpenSSH's client, with the user's own keys, known hosts and ~/.ssh/config."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any

from grpo_core.config.launch import host_name
from grpo_core.config.run import RunConfig
from grpo_core.system.files import umask
from tasks.processes.launchers.machines import Machine, why_unfit
from tasks.processes.relay import ENDING_SECONDS
from tasks.processes.run import training_python
from tasks.stages.errors import StageError

# A host that is silent for 5 s × 4 is lost: about as long as a host waits for a sign of life.
ALIVE_SECONDS, ALIVE_COUNT = 5, 4
OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": 10,
    "ControlPath": "none",  # a shared connection would not be watched, and would outlive what it runs
    "RequestTTY": "no",
    "ServerAliveInterval": ALIVE_SECONDS,
    "ServerAliveCountMax": ALIVE_COUNT,
}
LOST_SECONDS = ALIVE_SECONDS * (ALIVE_COUNT + 1)  # until a lost connection is noticed
RELAY_SECONDS = ENDING_SECONDS + LOST_SECONDS  # until a relay has ended what it runs, and itself
CHECK_SECONDS = 90.0  # for a host to answer; Python's first start there reads its files from shared storage
READING_SECONDS = 1.0  # to read an answer that is there
PAUSE_SECONDS = 5.0  # before missing hosts are asked again
SILENT = "silent"


@contextmanager
def ssh(config: RunConfig, folder: Path, patience: float, say: Callable[[str], None]) -> Iterator[list[Machine]]:
    """Give the first of launch.hosts that answer and are fit, as many as are needed: each sees the run's folder and has
    the same code as this machine."""
    needed = f"train.num_machines={config.train.num_machines} are"
    hosts, count = config.launch.hosts, config.train.num_machines
    answers = answering_hosts("launch.hosts", hosts, count, needed, folder, say, patience=patience)
    yield [
        Machine(
            name=host_name(host),
            command=relay_command(host),
            address=address_of(host),
            port=answer["port"],
            grace=RELAY_SECONDS,
        )
        for host, answer in answers.items()
    ]


def answering_hosts(
    key: str,
    hosts: list[str],
    count: int,
    needed: str,
    folder: Path,
    say: Callable[[str], None],
    towards: str = "",
    patience: float = 0.0,
) -> dict[str, dict[str, Any]]:
    """Return the first `count` hosts that answer and can be used, with their answers to the check. Hosts after them are
    not waited for.

    `key`: configuration key that names the hosts; `needed`: how many are needed and why, for the error; `towards`: see
    `machine.check`; `say`: told why a host that answers is passed over. Raises StageError if fewer can be used within
    `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while True:
        fit, unfit, silent = dict[str, dict[str, Any]](), list[str](), list[str]()
        with closing(_ask(hosts, folder.absolute(), towards)) as answers:
            for host, answer in answers:
                if SILENT in answer:
                    silent.append(f"{host}: {answer[SILENT]}")
                elif reason := why_unfit(host, answer, folder):
                    unfit.append(reason)
                else:
                    fit[host] = answer
                if len(fit) == count:
                    for reason in unfit:
                        say(f"{reason}. Another host takes its place")
                    return fit
        if time.monotonic() > deadline:
            raise StageError(
                f"{len(fit)} of the {len(hosts)} hosts in {key} can be used, but {needed} needed. "
                f"{'; '.join([*unfit, *silent])}" + ". Try `ssh -o BatchMode=yes HOST true`" * bool(silent)
            )
        time.sleep(PAUSE_SECONDS)


def relay_command(host: str) -> list[str]:
    """Arguments with which `python` here runs `python` on the host; the arguments for `python` there follow."""
    return ["-m", "tasks.processes.relay", json.dumps(remote_command(host, "run"))]


def remote_command(host: str, action: str) -> list[str]:
    """Command that runs `tasks.processes.machine ACTION` on the host: in this working directory, by this Python, with
    this umask."""
    options = [word for name, value in OPTIONS.items() for word in ("-o", f"{name}={value}")]
    path = [f"PYTHONPATH={os.environ['PYTHONPATH']}"] if "PYTHONPATH" in os.environ else []
    start = ["env", *path, "PYTHONSAFEPATH=1", training_python(), "-m", "tasks.processes.machine", action]
    there = f"umask {umask():o} && cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(start)}"
    return ["ssh", *options, "--", host, there]


def _ask(hosts: list[str], folder: Path, towards: str) -> Generator[tuple[str, dict[str, Any]]]:
    """Ask all hosts concurrently; yields in their order each host with its answer to the check, or under SILENT why
    there is none. When this is closed, the checks that still run are ended."""
    file = folder / f".host-check-{secrets.token_hex(8)}"  # a new name: NFS caches which files do not exist
    deadline = time.monotonic() + CHECK_SECONDS
    with ExitStack() as stack:
        stack.callback(file.unlink)
        file.touch()
        asked = {}
        for host in hosts:
            asked[host] = stack.enter_context(
                Popen(remote_command(host, "check"), stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True)
            )
            stack.callback(_end, asked[host])  # runs before the wait
            _write(asked[host], json.dumps({"file": str(file), "towards": towards}) + "\n")
        for host, process in asked.items():
            yield host, _answer(process, deadline)


def _write(process: Popen[str], request: str) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # ssh has failed; its output says why
        process.stdin.write(request)
        process.stdin.flush()


def _end(process: Popen[str]) -> None:
    process.kill()
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # of a request that was never read
        process.stdin.close()


def _answer(process: Popen[str], deadline: float) -> dict[str, Any]:
    seconds = max(READING_SECONDS, deadline - time.monotonic())  # one that was silent leaves the next ones time
    try:
        output, errors = process.communicate(timeout=seconds)
        return dict(json.loads(output.splitlines()[-1]))  # a login shell may print before it
    except TimeoutExpired:
        return {SILENT: f"no answer within {CHECK_SECONDS:g} s"}
    except (ValueError, TypeError, IndexError):
        return {SILENT: (errors.strip().splitlines() or [f"status {process.returncode}"])[-1]}


def address_of(host: str) -> str:
    """Address of the host as ssh resolves it, aliases in ~/.ssh/config included."""
    done = subprocess.run(["ssh", "-G", "--", host], capture_output=True, text=True, check=True)
    return next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("hostname "))
