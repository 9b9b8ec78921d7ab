"""The vLLM servers of a stage: on this machine or on hosts of their own, for the length of the stage, restarted when
they die. For servers on machines of a scheduler's job, see `tasks.processes.launch.job_servers`."""

from __future__ import annotations

import collections
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from logging import Logger, LoggerAdapter
from pathlib import Path
from typing import Any

import httpx2

from grpo_core.config.launch import host_name
from grpo_core.rollout.vllm.secret import SECRET, with_secret
from grpo_core.rollout.vllm.serve import ADDRESSES
from tasks.processes.gpus.slots import hold_gpus
from tasks.processes.launch import serve, url
from tasks.processes.launchers.ssh import RELAY_SECONDS, address_of, answering_hosts, relay_command
from tasks.processes.run import GRACE_SECONDS, TAIL_LINES, ProcessError, describe_status, training_python
from tasks.stages.errors import StageError
from tasks.stages.locks import held_locks
from tasks.stages.run import Context

POLL_SECONDS = 0.5
PAUSE_SECONDS = 2.0  # before a server that died is started again


@dataclass(frozen=True)
class Place:
    """Place of a server. `host`: "" for this machine; `command`: arguments with which `python` here runs the server
    there, and ends it when this `python` ends, in whatever way; `grace`: seconds that ending it may take."""

    host: str
    url: str
    command: list[str]
    grace: float
    log: Path


@contextmanager
def gpus_and_servers(
    context: Context, log: Logger | LoggerAdapter[Any], is_training: bool = False
) -> Iterator[dict[str, str]]:
    """Hold the GPUs of a stage and start its vLLM servers, which get those after its processes'. Gives the environment
    variables by which the processes find the servers.

    `context.config` has as many processes as the stage starts: both the GPUs and the servers' places follow from it.
    """
    with hold_gpus(context.config, is_training), servers(context, log) as addresses:
        yield addresses


@contextmanager
def servers(context: Context, log: Logger | LoggerAdapter[Any]) -> Iterator[dict[str, str]]:
    """Start the servers that the configuration asks for, and give the environment variables by which the stage's
    process finds them; empty if it asks for none. Raises StageError if a server does not start."""
    rollout = context.config.rollout
    if not rollout.starts_servers or context.config.servers_in_job:
        yield {}
        return
    addresses, secret = context.partial / "vllm-servers", {SECRET: secrets.token_hex(16)}
    started: list[_Server] = []
    announcing = threading.Lock()

    def announce() -> None:
        with announcing:
            written = addresses.with_suffix(".new")
            written.write_text("\n".join(server.place.url for server in started))
            written.rename(addresses)

    with ExitStack() as held:
        places = (
            _places_on_hosts(context, log.info)
            if context.config.launch.server_hosts
            else _places_on_this_machine(context, held)
        )
        held.callback(addresses.unlink, missing_ok=True)
        held.callback(_stop, started)
        for find in places:
            started.append(_Server(find, secret, log, announce))
        for server in started:
            server.wait_until_up(rollout.vllm_server_timeout)
        announce()
        try:
            yield {ADDRESSES: str(addresses), **secret}
        except ProcessError as error:
            if problems := [server.problem for server in started if server.problem]:
                raise ProcessError(f"{'; '.join(problems)}. {error}", error.restartable) from error
            raise


def _places_on_this_machine(context: Context, held: ExitStack) -> list[Callable[[], Place]]:
    """Return a function per server that gives its place: always the same, on the GPUs after those of the training and
    of the servers before."""
    rollout = context.config.rollout
    first = 0 if rollout.vllm_weight_transfer == "ipc" else context.config.train.num_processes

    def place(number: int) -> Place:
        address, port = held.enter_context(hold_port()).getsockname()
        gpu = first + number * rollout.vllm_tensor_parallel_size * rollout.vllm_data_parallel_size
        log = context.partial / f"vllm-server-{number}.log"
        command = serve(context.run, address, port, gpu)
        return Place("", url(address, port), command, GRACE_SECONDS, log)

    places = [place(number) for number in range(rollout.vllm_num_servers)]
    return [lambda place=place: place for place in places]


def _places_on_hosts(context: Context, say: Callable[[str], None]) -> list[Callable[[], Place]]:
    """Return a function per server that gives its place: the host that it was on before, or else the first of
    launch.server_hosts that is fit and has no server. The function raises StageError if there is no such host, or if
    the host lacks something."""
    config = context.config
    hosts, training = config.launch.server_hosts, config.launch.hosts if config.launch.launcher == "ssh" else []
    towards = address_of(training[0]) if training else ""
    chosen: dict[int, str] = {}
    choosing = threading.Lock()

    def place(number: int) -> Place:
        with choosing:
            others = {host for other, host in chosen.items() if other != number}
            free = sorted((host for host in hosts if host not in others), key=lambda host: host != chosen.get(number))
            answers = answering_hosts(
                "launch.server_hosts (those with a server left out)",
                free,
                1,
                "one for a server is",
                context.partial,
                say,
                towards,
            )
            [(host, answer)] = answers.items()
            chosen[number] = host
        address, port, name = answer["address"], answer["port"], host_name(host)
        if not address:
            raise StageError(f"{host} cannot reach {towards}, where the training runs (launch.hosts)")
        return Place(
            host=name,
            url=url(address, port),
            # The first of the GPUs that the server takes there.
            command=[*relay_command(host), *serve(context.run, address, port, 0)],
            grace=RELAY_SECONDS,
            log=context.partial / f"vllm-server-{number}-{name}.log",
        )

    return [partial(place, number) for number in range(config.rollout.vllm_num_servers)]


class _Server:
    """One server under supervision, its output in a file. Stopping it stops all processes that it started.

    `find` gives its place for each start; `announce` tells the training that the place has changed.
    """

    def __init__(
        self,
        find: Callable[[], Place],
        secret: dict[str, str],
        log: Logger | LoggerAdapter[Any],
        announce: Callable[[], None],
    ):
        self.find, self.log, self.announce = find, log, announce
        self.environment = {**os.environ, "PYTHONSAFEPATH": "1", **secret}
        self.stopping, self.changing = threading.Event(), threading.Lock()
        self.problem = ""  # set until it is up again
        self.place = find()
        self.process = self._start(self.place)
        self.watch = threading.Thread(target=self._watch, daemon=True)

    @property
    def name(self) -> str:
        return f"the vLLM server at {self.place.url}{f' on {self.place.host}' * bool(self.place.host)}"

    def wait_until_up(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._is_up():
            if self.process.poll() is not None or time.monotonic() > deadline:
                with self.place.log.open(errors="replace") as lines:
                    tail = "".join(collections.deque(lines, TAIL_LINES))
                code = self.process.poll()
                what = f"is not up after {seconds:g} s (rollout.vllm_server_timeout)"
                what = what if code is None else f"ended with {describe_status(code)} before it was up"
                raise StageError(f"{self.name} {what}; the end of {self.place.log}:\n{tail}")
            time.sleep(POLL_SECONDS)
        self.log.info("%s is up; its log is %s", self.name, self.place.log.name)
        self.watch.start()

    def tell_to_stop(self) -> None:
        self.stopping.set()
        with self.changing:
            self.process.terminate()

    def _start(self, place: Place) -> subprocess.Popen[bytes]:
        supervise = ["-m", "tasks.processes.supervise", str(place.grace), training_python()]
        with place.log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, *supervise, *place.command],
                stdin=subprocess.PIPE,  # it closes when this process dies
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=held_locks(),
                env=self.environment,
            )

    def _watch(self) -> None:
        """Restart the server whenever it ends. Meanwhile the training waits, for at most
        rollout.vllm_server_timeout."""
        while not self.stopping.is_set():
            if (code := self.process.poll()) is None:
                if self.problem and self._is_up() and self._is_announced():
                    self.problem = ""
                    self.log.info("%s is up", self.name)
                self.stopping.wait(POLL_SECONDS)
                continue
            self.problem = self.problem or f"{self.name} ended with {describe_status(code)}"
            self.log.warning("%s ended with %s and is started again", self.name, describe_status(code))
            self.stopping.wait(PAUSE_SECONDS)
            try:
                self._restart(self.find())
            except (OSError, StageError) as error:  # no host, memory, process or disk space: try again later
                if not self.stopping.is_set():
                    self.log.error("%s cannot be started again: %s", self.name, error)

    def _restart(self, place: Place) -> None:
        with self.changing:
            if not self.stopping.is_set():
                self.place, self.process = place, self._start(place)

    def _is_announced(self) -> bool:
        try:
            self.announce()
        except OSError as error:  # a full disk: try again later
            self.log.error("%s is up, and the training cannot be told: %s", self.name, error)
            return False
        return True

    def _is_up(self) -> bool:
        plain = {"trust_env": False, "verify": False}  # no proxy, and no certificates to load for http
        try:
            answer = httpx2.get(f"{self.place.url}/health", timeout=5, headers=with_secret(self.environment), **plain)
        except httpx2.HTTPError:
            return False
        return answer.status_code == 200


def _stop(started: list[_Server]) -> None:
    for server in started:
        server.tell_to_stop()
    for server in started:
        server.process.wait()


def hold_port() -> socket.socket:
    """Bind a free port of 127.0.0.1: the system gives it to no other process while the socket is open.

    A server that sets SO_REUSEADDR, as vLLM's does, can listen on it nevertheless.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held
