"""The vLLM servers of a stage: on this machine, for the length of the stage, restarted when they die."""

from __future__ import annotations

import collections
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from logging import Logger, LoggerAdapter
from pathlib import Path
from typing import Any

import httpx2

from grpo_core.config.rollout import RolloutConfig
from grpo_core.config.run import RunConfig
from grpo_core.rollout.vllm.serve import ADDRESSES
from tasks.processes.run import GRACE_SECONDS, TAIL_LINES
from tasks.stages.errors import StageError
from tasks.stages.locks import held_locks
from tasks.stages.run import Context

POLL_SECONDS = 0.5
PAUSE_SECONDS = 2.0  # before a server that died is started again


@contextmanager
def servers(context: Context, log: Logger | LoggerAdapter[Any]) -> Iterator[dict[str, str]]:
    """Start the servers that the configuration asks for, and give the environment variables by which the stage's
    process finds them; empty if it asks for none. Raises StageError if a server does not start."""
    rollout = context.config.rollout
    if not _starts_servers(rollout):
        yield {}
        return
    devices = _devices(context.config)
    with ExitStack() as running:
        started = []
        for number in range(rollout.vllm_num_servers):
            output = context.partial / f"vllm-server-{number}.log"
            server = _Server(context.run / "config.toml", output, devices[number], log)
            running.callback(server.stop)
            started.append(server)
        for server in started:
            server.wait_until_up(rollout.vllm_server_timeout)
        yield {ADDRESSES: " ".join(server.url for server in started)}


class _Server:
    """One server under supervision, its output in a file. Stopping it stops all processes that it started."""

    def __init__(self, config: Path, output: Path, environment: dict[str, str], log: Logger | LoggerAdapter[Any]):
        self.held = hold_port()
        port = self.held.getsockname()[1]
        self.url, self.output, self.log = f"http://127.0.0.1:{port}", output, log
        self.command = ["-m", "grpo_core.rollout.vllm.serve", str(config), "--port", str(port)]
        self.environment = {**os.environ, "PYTHONSAFEPATH": "1", **environment}
        self.stopping, self.changing = threading.Event(), threading.Lock()
        self.process = self._start()
        self.watch = threading.Thread(target=self._watch, daemon=True)

    def wait_until_up(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._is_up():
            if self.process.poll() is not None or time.monotonic() > deadline:
                with self.output.open(errors="replace") as lines:
                    tail = "".join(collections.deque(lines, TAIL_LINES))
                code = self.process.poll()
                what = f"is not up after {seconds:g} s (rollout.vllm_server_timeout)"
                what = what if code is None else f"ended with status {code} before it was up"
                raise StageError(f"the vLLM server at {self.url} {what}; the end of {self.output}:\n{tail}")
            time.sleep(POLL_SECONDS)
        self.log.info("a vLLM server is up at %s; its log is %s", self.url, self.output.name)
        self.watch.start()

    def stop(self) -> None:
        with self.changing:
            self.stopping.set()
            self.process.terminate()
        self.process.wait()
        self.held.close()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.output.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "tasks.processes.supervise", str(GRACE_SECONDS), sys.executable, *self.command],
                stdin=subprocess.PIPE,  # it closes when this process dies
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=held_locks(),
                env=self.environment,
            )

    def _watch(self) -> None:
        """Restart it whenever it ends. Meanwhile the training waits, for at most rollout.vllm_server_timeout."""
        while True:
            code = self.process.wait()
            self.stopping.wait(PAUSE_SECONDS)
            with self.changing:
                if self.stopping.is_set():
                    return
                self.log.warning("the vLLM server at %s ended with status %s and is started again", self.url, code)
                try:
                    self.process = self._start()
                except OSError as error:  # no memory, no process, no space on the disk: try again later
                    self.log.error("the vLLM server at %s cannot be started: %s", self.url, error)

    def _is_up(self) -> bool:
        try:
            answer = httpx2.get(f"{self.url}/health", timeout=5, trust_env=False)  # a proxy has its own 127.0.0.1
        except httpx2.HTTPError:
            return False
        return answer.status_code == 200


def gpus_of_servers(rollout: RolloutConfig) -> int:
    """How many GPUs the servers that a stage starts take, beside those of its other processes."""
    if not _starts_servers(rollout) or rollout.vllm_weight_transfer == "ipc":
        return 0
    return rollout.vllm_num_servers * rollout.vllm_tensor_parallel_size * rollout.vllm_data_parallel_size


def _starts_servers(rollout: RolloutConfig) -> bool:
    return rollout.engine == "vllm-server" and not rollout.vllm_server_base_urls


def _devices(config: RunConfig) -> list[dict[str, str]]:
    """For each server, the variable with the GPUs that it sees: those after the training's own; with ipc, the
    training's GPU."""
    import torch

    rollout = config.rollout
    count = torch.cuda.device_count()
    if count == 0:
        return [{} for _ in range(rollout.vllm_num_servers)]
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = own.split(",") if own else [str(number) for number in range(count)]
    each = rollout.vllm_tensor_parallel_size * rollout.vllm_data_parallel_size
    first = 0 if rollout.vllm_weight_transfer == "ipc" else config.train.num_processes
    if first + each * rollout.vllm_num_servers > len(visible):
        raise StageError(
            f"the training takes {first} GPUs and its {rollout.vllm_num_servers} vLLM servers {each} each "
            "(rollout.vllm_num_servers, vllm_tensor_parallel_size, vllm_data_parallel_size), and there are "
            f"{len(visible)}; lower one of them, or train.num_processes"
        )
    starts = range(first, first + each * rollout.vllm_num_servers, each)
    return [{"CUDA_VISIBLE_DEVICES": ",".join(visible[start : start + each])} for start in starts]


def hold_port() -> socket.socket:
    """Bind a free port of 127.0.0.1: the system gives it to no other process while the socket is open.

    A server that sets SO_REUSEADDR, as vLLM's does, can listen on it nevertheless.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held
