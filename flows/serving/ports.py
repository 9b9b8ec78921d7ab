"""Ports of this machine: are they free, and if not, which process listens there?"""

from __future__ import annotations

import shlex
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from flows.serving.find_server import SERVER_ID, ask
from flows.serving.up_file import ServerError
from tasks.stages.run_directory import storage_root

HOST = "127.0.0.1"
LEAST_PORT = 1024  # only the administrator's processes may listen on lower ports
COMMAND_SHOWN = 100  # characters


def refuse_taken(ports: Mapping[str, int]) -> None:
    """Raises ServerError if one of the ports cannot be used. `ports`: by the option that sets each."""
    if len(set(ports.values())) < len(ports):
        raise ServerError(f"{' and '.join(ports)} are the same port: give each server its own")
    for option, port in ports.items():
        if problem := _port_problem(port):
            raise ServerError(f"{option} {port}: {problem}. Nothing was started. Free ports: {_free(ports)}")


def is_listening(process: psutil.Process, port: int) -> bool:
    """True if the process, or one that it has started, listens on the port."""
    with suppress(psutil.NoSuchProcess):
        return not _listeners(port).isdisjoint({process.pid, *(it.pid for it in process.children(recursive=True))})
    return False


def _listeners(port: int) -> set[int | None]:
    """Ids of the processes that listen on the port; None for a process of another user."""
    listening = [it for it in psutil.net_connections("tcp") if it.status == psutil.CONN_LISTEN]
    return {it.pid for it in listening if it.laddr.port == port}


def _port_problem(port: int) -> str:
    refusal = _refusal(port)
    if isinstance(refusal, PermissionError):
        return "only the administrator's processes may listen there"
    return f"the port is taken by {_owner(port)}" if refusal else ""


def _refusal(port: int) -> OSError | None:
    """The system's error if this process cannot listen on the port."""
    try:
        socket.create_server((HOST, port)).close()
    except OSError as error:
        return error
    return None


def _free(ports: Mapping[str, int]) -> str:
    """First free port for each option, at or above its present one, as arguments."""
    found: dict[str, int] = {}
    for option, first in ports.items():
        later = range(max(first, LEAST_PORT), 65536)
        found[option] = next((it for it in later if it not in found.values() and not _refusal(it)), 0)
    return " ".join(f"{option} {port}" for option, port in found.items())


def _owner(port: int) -> str:
    """Describe the process that listens on the port, as far as this user may see it."""
    answer = ask(f"http://{HOST}:{port}/api")
    storage, process = answer.storage if answer else "", "a process of another user"
    with suppress(psutil.Error, StopIteration):
        found = psutil.Process(next(filter(None, _listeners(port))))
        process = f"process {found.pid} of {found.username()}, {shlex.join(found.cmdline())[:COMMAND_SHOWN]}"
        if SERVER_ID in (environment := found.environ()):
            storage = environment["GRPO_STORAGE"]
    if not storage:
        return process
    whose = "this storage" if Path(storage) == storage_root() else f"another storage, {storage}"
    return f"a server of grpo over {whose} ({process})"
