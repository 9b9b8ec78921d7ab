"""The environments of one training process, each in a process of its own (`worker`), asked without waiting."""

from __future__ import annotations

import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from grpo_core.config.environment import EnvironmentConfig
from grpo_core.environments.registry import EnvironmentsError, source_of
from grpo_core.environments.worker import MAX_BYTES, receive, send
from grpo_core.system.guard import end_guarded, start_guarded

START_SECONDS = 300.0  # for importing the classes and tools
OPEN_FILES = 1 << 16  # conversations that this process can hold at a time, if the system allows it


class CallError(Exception):
    """A request that an environment could not answer. `is_lost`: true if its state is gone and it cannot continue."""

    def __init__(self, message: str, is_lost: bool):
        super().__init__(message)
        self.is_lost = is_lost


@dataclass
class Environment:
    """One environment's process, as this process sees it. At most one request is under way."""

    socket: socket.socket
    pid: int
    name: str = ""
    deadline: float = 0.0  # of the request that is under way
    received: bytearray = field(default_factory=bytearray)
    is_asked: bool = False
    requests: int = 0  # so far: the number of the last one
    paused: float = 0.0  # seconds so far in which no answer was looked for

    def ask(self, request: Mapping[str, Any], seconds: float) -> None:
        """Start a request; `answer` returns its answer."""
        self.deadline, self.is_asked = time.monotonic() + seconds, True
        self.requests += 1
        with suppress(OSError):  # it has ended, or reads nothing: the answer will say so
            self.socket.settimeout(seconds)
            send(self.socket, pickle.dumps({**request, "number": self.requests}))

    def pause(self, seconds: float) -> None:
        """Extend the time limit by `seconds` in which no answer was looked for."""
        self.deadline += seconds
        self.paused += seconds

    def rest(self) -> None:
        """End the conversation: tools forget what they have kept for it. There is no answer."""
        with suppress(OSError):
            send(self.socket, pickle.dumps({"do": "rest"}))

    def answer(self, seconds: float = 0.0) -> dict[str, Any] | None:
        """Return the answer if it arrives within `seconds`, else None. Raises CallError, and ends the process, if that
        has ended or has sent something else than an answer, or if the request's time is up."""
        end = time.monotonic() + seconds
        while self.is_running:
            try:
                answer = self._next_frame()
            except (ValueError, RecursionError):
                return self._lose("it wrote into the connection of its process")
            if answer is not None:
                self.is_asked = False
                return answer
            waiting = select.poll()  # select.select takes no descriptor above 1023
            waiting.register(self.socket, select.POLLIN)
            if not waiting.poll(1000 * max(0.0, min(end, self.deadline) - time.monotonic())):
                if time.monotonic() >= self.deadline:
                    self._lose("its time was up")
                if time.monotonic() >= end:
                    return None
                continue
            try:
                part = self.socket.recv(1 << 16)
            except OSError:
                part = b""
            if not part:
                break
            self.received += part
        return self._lose("its process ended")

    def _next_frame(self) -> dict[str, Any] | None:
        """Return the answer if it has arrived, else None. Raises ValueError or RecursionError if it is no answer."""
        if len(self.received) < 4:
            return None
        size = struct.unpack(">I", self.received[:4])[0]
        if size > 2 * MAX_BYTES:
            raise ValueError
        if len(self.received) < 4 + size:
            return None
        answer = json.loads(bytes(self.received[4 : 4 + size]))
        del self.received[: 4 + size]
        if not isinstance(answer, dict) or answer.get("to") != self.requests:
            raise ValueError
        return answer

    def _lose(self, why: str) -> NoReturn:
        self.kill()
        raise CallError(why, is_lost=True)

    def kill(self) -> None:
        """End the process and its group. Its keeper ends what it has started outside of that group."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.pid = 0
        self.socket.close()

    @property
    def is_running(self) -> bool:
        return self.pid != 0


class Environments:
    """Environments and tools of a configuration: their schemas, and processes to hold conversations with.

    Made once per training process. They end with this object, and with the process that holds it, however it ends.
    `described`: others of the same configuration, whose schemas are taken, since describing tools takes a second.
    """

    def __init__(self, config: EnvironmentConfig, described: Environments | None = None):
        self.config, self.described = config, described
        self.idle: list[Environment] = []
        self.taken: dict[int, Environment] = {}  # by id()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, OPEN_FILES)), hard))
        self._start()

    def _start(self) -> None:
        """Start the process that starts environments. Raises EnvironmentsError if one of them cannot be used."""
        config = self.config
        guard, self.control = start_guarded("grpo_core.environments.worker")
        self.close = weakref.finalize(self, end_guarded, guard, self.control)
        factories = {name: source_of(source) for name, source in config.factories.items()}
        setup = {
            "path": [str(Path(entry).absolute()) for entry in sys.path],
            "tools": {source.rpartition(":")[2]: source_of(source) for source in config.tools},  # as a policy calls it
            "factories": factories,
            "args": {name: config.args_of(name) for name in factories},
            "memory_gib": config.memory_gib,
            "describes": self.described is None,
        }
        found: dict[str, Any] = {"refused": "the process that imports and makes them has ended; its output says why"}
        try:
            with self._connect() as first:
                send(first, pickle.dumps(setup))
                if description := receive(first):
                    found = json.loads(description)
        except TimeoutError:
            found = {"refused": f"importing and making them had not ended after {START_SECONDS:g} s"}
        except ConnectionError:
            pass
        if "refused" in found:
            self.close()
            raise EnvironmentsError(f"environment: {found['refused']}")
        self.common: dict[str, Any] = self.described.common if self.described else found["tools"]
        self.own: dict[str, dict[str, Any]] = self.described.own if self.described else found["environments"]

    def name_for(self, row: Mapping[str, Any]) -> str:
        """The environment of a row of the data. Raises EnvironmentsError if there is none of its name."""
        if not isinstance(self.config.environment_factory, dict):
            return ""
        name = row.get("environment")
        if name not in self.own:
            raise EnvironmentsError(
                f"a row of the data is for the environment {name!r} (its column `environment`), and "
                f"environment.environment_factory names {sorted(self.own)}"
            )
        return str(name)

    def tools(self, name: str) -> dict[str, Any]:
        """JSON schema of each tool that rows of this environment have."""
        return self.own[name]["tools"] if name in self.own else self.common

    def has_reward(self, name: str) -> bool:
        """True if this environment has a reward of its own (`get_reward`)."""
        return name in self.own and self.own[name]["has_reward"]

    def take(self) -> Environment:
        """Take a free environment process, or a new one; `free` gives it back."""
        while self.idle:
            environment = self.idle.pop()
            if environment.is_running:
                self.taken[id(environment)] = environment
                return environment
        if (new := self._new()) is None:
            print(
                "environment: the process that starts environments has ended, and so have they; it is started again",
                flush=True,
            )
            self.close()
            self._start()
            new = self._new()
        if new is None:
            raise EnvironmentsError("environment: no process could be started for another one; the output says why")
        self.taken[id(new)] = new
        return new

    def _new(self) -> Environment | None:
        """Start a new process for an environment; None if the process that starts them has ended."""
        try:
            connection = self._connect()
            hello = receive(connection)
        except (ConnectionError, TimeoutError):
            return None
        return Environment(connection, json.loads(hello)["pid"]) if hello else None

    def free(self, environments: Iterable[Environment]) -> None:
        """Give environments back after their conversations. One whose question is still under way, since sampling was
        abandoned, is ended."""
        for environment in environments:
            if self.taken.pop(id(environment), None) is None:
                continue
            if environment.is_asked:
                environment.kill()
            elif environment.is_running:
                environment.rest()
            self.idle.append(environment)

    def free_all(self) -> None:
        """Give all environments back after their conversations."""
        self.free([*self.taken.values()])

    def _connect(self) -> socket.socket:
        try:
            mine, theirs = socket.socketpair()
        except OSError as error:
            raise EnvironmentsError(
                f"environment: {len(self.taken)} conversations are held already, and no other can begin: {error}; "
                "raise the limit of open files (ulimit -n), or let fewer be sampled together"
            ) from error
        mine.settimeout(START_SECONDS)
        with theirs:
            socket.send_fds(self.control, [b"."], [theirs.fileno()])
        return mine


def wait_for_any(environments: Sequence[Environment], seconds: float) -> None:
    """Return when one of them has something to read, or after `seconds`."""
    running = [environment for environment in environments if environment.is_running]
    if running and seconds > 0:
        poll = select.poll()
        for environment in running:
            poll.register(environment.socket, select.POLLIN)
        poll.poll(1000 * seconds)


class Seen:
    """An environment as reward functions see it (TRL's `environments`): attributes and methods of the real one, which
    is in another process. Values come as JSON."""

    def __init__(self, environment: Environment, reward: float | None, seconds: float):
        self._environment, self._reward, self._seconds = environment, reward, seconds

    def get_reward(self) -> float | None:
        """Return what the environment's own get_reward gave; it is called once per conversation."""
        return self._reward

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        answer = self._answer({"do": "get", "name": name})
        if "missing" in answer:
            raise AttributeError(answer["missing"][1])
        if "callable" in answer:
            return lambda *args, **kwargs: self._answer({"do": "invoke", "name": name, "args": args, "kwargs": kwargs})[
                "value"
            ]
        return answer["value"]

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        self._environment.ask(request, self._seconds)
        try:
            answer = self._environment.answer(self._seconds)
        except CallError as error:
            raise EnvironmentsError(f"environment: a reward asked for {request['name']!r}, and {error}") from error
        if answer is None or "raised" in answer:
            kind, text = answer["raised"] if answer else ("TimeoutError", f"no answer within {self._seconds:g} s")
            raise EnvironmentsError(f"environment: a reward asked for {request['name']!r}: {kind}: {text}")
        return answer
