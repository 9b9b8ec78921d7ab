"""The event loop of reward functions, on which a function may keep clients, semaphores and tasks between batches."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from grpo_core.config.inputs import RewardConfig
from grpo_core.errors import RewardError
from grpo_core.rewards import event_loop, scoring
from grpo_core.rewards.batch import Batch
from grpo_core.rewards.contract import resolve
from grpo_core.rewards.scoring import score
from grpo_core.training.interrupt import Stopped
from tests.grpo_core.rewards.conftest import Declare

pytestmark = pytest.mark.slow

# `ask` keeps one connection, its turns and a task; a completion of "hang" is answered only when the server ends.
KEEPING = """
import asyncio, os, signal
import aiohttp, httpx

turns = asyncio.Semaphore(1)  # two calls at a time wait for each other, which binds it to a loop
client = httpx.AsyncClient(trust_env=False, timeout=60)
session = None
asked, answered = asyncio.Queue(), asyncio.Queue()
worker = None

async def by_httpx(url, text):
    return (await client.post(url, content=text)).text

async def by_aiohttp(url, text):
    global session
    session = session or aiohttp.ClientSession()
    async with session.post(url, data=text) as response:
        return await response.text()

async def work():
    while True:
        await answered.put(await by_httpx(*await asked.get()))

stream = None

async def streamed(completions, url):
    global stream
    text = completions[0]
    if stream is None or stream[0].at_eof():
        stream = await asyncio.open_connection(*url.removeprefix("http://").strip("/").split(":"))
    reader, writer = stream
    writer.write(f"POST / HTTP/1.1\\r\\nContent-Length: {len(text)}\\r\\n\\r\\n{text}".encode())
    await reader.readuntil(b"\\r\\n\\r\\n")
    return [float(await reader.readexactly(1))]

async def by_a_task(url, text):
    global worker
    worker = worker or asyncio.create_task(work())
    await asked.put((url, text))
    return await answered.get()

async def ask(completions, url, way="by_httpx"):
    async def one(text):
        async with turns:
            return float(await globals()[way](url, text))
    return await asyncio.gather(*map(one, completions))

def coroutine(completions, url, way="by_httpx"):
    return ask(completions, url, way)

async def interrupted(completions, url):
    asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGINT)
    return await ask(["hang", "hang"], url)

async def deaf(completions):
    while True:
        try: await asyncio.sleep(60)
        except asyncio.CancelledError: pass
"""


@dataclass
class Server:
    """A server that says how long each text is."""

    url: str = ""
    connections: int = 0
    said: list[str] = field(default_factory=list)
    ended: list[threading.Event] = field(default_factory=list)  # one per connection, set when it has ended


@contextmanager
def measuring(keeps_seconds: float | None = None) -> Iterator[Server]:
    """`keeps_seconds`: time after which an idle connection is closed."""
    server, over = Server(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = keeps_seconds

        def handle(self) -> None:
            server.connections += 1
            server.ended.append(ended := threading.Event())
            super().handle()
            self.connection.shutdown(socket.SHUT_RDWR)  # files over it stay open for a while
            ended.set()

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"])).decode()
            server.said.append(text)
            if text == "hang":
                over.wait()
            body = str(len(text)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    class Threads(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass

    with Threads(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_address[1]}/"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            over.set()
            http.shutdown()
            thread.join()


@pytest.fixture
def declared(declare: Declare) -> Callable[..., RewardConfig]:
    return declare(KEEPING)


def _batch(*texts: str) -> Batch:
    return Batch([{"prompt": "p"}] * len(texts), list(texts), [[1]] * len(texts))


@pytest.mark.parametrize(
    ("function", "isolated", "way"),
    [
        ("ask", False, "by_httpx"),
        ("ask", False, "by_aiohttp"),
        ("ask", False, "by_a_task"),
        ("coroutine", False, "by_httpx"),
        ("ask", True, "by_httpx"),
        ("coroutine", True, "by_httpx"),
    ],
)
def test_a_function_keeps_its_client_semaphore_and_task_over_batches(
    declared: Callable[..., RewardConfig], function: str, isolated: bool, way: str
) -> None:
    with measuring() as server:
        reward = resolve(declared(function, isolated=isolated, args={"url": server.url, "way": way}))
        for batch in (("a", "bb"), ("ccc", "d"), ("ee", "f")):
            assert score([reward], _batch(*batch)) == [[float(len(text)) for text in batch]]
        assert server.connections == 1
        if reward.process:
            reward.process.end()


@pytest.mark.parametrize(
    ("function", "args"), [("ask", {"way": "by_httpx"}), ("ask", {"way": "by_aiohttp"}), ("streamed", {})]
)
def test_a_connection_that_the_server_ended_between_two_batches_is_made_again(
    declared: Callable[..., RewardConfig], function: str, args: dict[str, str]
) -> None:
    """aiohttp and a stream send over it unless its end was read before: the loop stood still when it came."""
    with measuring(keeps_seconds=0.1) as server:
        reward = resolve(declared(function, args={"url": server.url, **args}))
        for number in range(1, 3):
            assert score([reward], _batch("a")) == [[1.0]]
            assert server.connections == number
            assert server.ended[-1].wait(60)


def test_a_time_out_and_an_interrupt_leave_the_loop_as_it_was(
    declared: Callable[..., RewardConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise Stopped

    with measuring() as server:
        args = {"url": server.url}
        reward = resolve(declared("ask", args=args))
        assert score([reward], _batch("a", "bb")) == [[1.0, 2.0]]
        loop = event_loop.loop.get()
        with pytest.raises(RewardError, match=r"'ask' did not come back within 0\.3 s for .*'hang', which alone"):
            score([resolve(declared("ask", args=args, timeout=0.3))], _batch("a", "hang"))
        assert score([reward], _batch("a", "bb")) == [[1.0, 2.0]]
        before = signal.signal(signal.SIGINT, stop)
        try:
            with pytest.raises(Stopped):
                score([resolve(declared("interrupted", args=args))], _batch("a"))
        finally:
            signal.signal(signal.SIGINT, before)
        assert score([reward], _batch("a", "bb")) == [[1.0, 2.0]]
        assert event_loop.loop.get() is loop
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of what is ended by force
def test_a_loop_that_cannot_be_freed_is_replaced(
    declared: Callable[..., RewardConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (event_loop, scoring):
        monkeypatch.setattr(module, "GRACE", 0.1)
    loop = event_loop.loop.get()
    with pytest.raises(RewardError, match=r"reward 'deaf' did not come back within 0\.2 s"):
        score([resolve(declared("deaf", timeout=0.2))], _batch("a"))
    assert loop.is_closed()
    with measuring() as server:
        assert score([resolve(declared("ask", args={"url": server.url}))], _batch("a", "bb")) == [[1.0, 2.0]]


def test_the_loop_is_closed_when_the_process_ends(tmp_path: Path) -> None:
    (tmp_path / "keeping.py").write_text("""
import asyncio
tasks = []
async def kept():
    try: await asyncio.Event().wait()
    finally: print("cleaned up")
async def f(completions):
    tasks.append(asyncio.create_task(kept()))
    await asyncio.to_thread(len, completions)
    return [1.0] * len(completions)
""")
    program = """
from grpo_core.config.inputs import RewardConfig
from grpo_core.rewards.batch import Batch
from grpo_core.rewards.contract import resolve
from grpo_core.rewards.scoring import score
from grpo_core.system.processes import run_and_leave
reward = resolve(RewardConfig(function="keeping:f"))
run_and_leave(lambda: [print(score([reward], Batch([{"prompt": "p"}], ["a"], [[1]]))) for _ in range(2)])
"""
    command = [sys.executable, "-W", "error", "-c", program]
    ended = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": f"{Path.cwd()}:{tmp_path}"}, capture_output=True)
    assert ended.stdout.decode().splitlines() == ["[[1.0]]", "[[1.0]]", "cleaned up", "cleaned up"], ended.stderr
    assert (ended.returncode, ended.stderr) == (0, b"")
