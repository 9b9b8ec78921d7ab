"""A judge of the test's own: an HTTP server that speaks OpenAI's API and says what the test wants to hear."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

USED = {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100}


@dataclass
class Judge:
    """`say`: (question, number of the request from 1) → the judge's text, or status, body and, where there are any,
    further headers of another answer."""

    url: str
    say: Callable[[str, int], str | tuple[Any, ...]]
    questions: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)  # by their names in lower case
    bodies: list[dict[str, Any]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0


def completed(text: str | None, finish_reason: str = "stop") -> dict[str, Any]:
    """An answer as OpenAI's API gives it."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": finish_reason, "message": message}
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": USED}


def material(question: str) -> list[str]:
    """What stands between the marks of a question, mark by mark."""
    mark = re.search(r"\[\[[0-9a-f]{16}\]\]", question)
    assert mark is not None
    return [part.strip("\n") for part in question.split(mark[0])[2::2]]  # after the first, which explains it


def by_length(question: str, _: int) -> str:
    """A sound judge: the more letters the better."""
    return f"I count them.\nScore: {min(len(material(question)[-1]), 10)}"


def contents(cache: Path) -> dict[str, Any]:
    """All that a cache holds: answers by digest, costs by kind."""
    with closing(sqlite3.connect(cache / "judge.sqlite")) as database:
        answers = {digest: json.loads(answer) for digest, answer in database.execute("SELECT * FROM answers")}
        return answers | dict(database.execute("SELECT * FROM costs"))


@contextmanager
def judging(say: Callable[[str, int], str | tuple[Any, ...]], port: int = 0) -> Iterator[Judge]:
    """Serves until the body ends; on a free port unless it has to be found where one was before."""
    lock, ended = threading.Lock(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                question = body["messages"][0]["content"]
                judge.questions.append(question)
                judge.bodies.append(body)
                judge.headers.append({name.lower(): value for name, value in self.headers.items()})
                number = len(judge.questions)
                judge.at_once += 1
                judge.most_at_once = max(judge.most_at_once, judge.at_once)
            said = judge.say(question, number)
            if said == "":  # never
                ended.wait()
            with lock:
                judge.at_once -= 1
            status, answer, *more = (200, completed(said)) if isinstance(said, str) else said
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            kind = "text/html" if isinstance(answer, bytes) else "application/json"
            try:
                self.send_response(status)
                headers = {"Content-Type": kind, "Content-Length": len(data), "retry-after-ms": 1}
                for name, value in (headers | dict(*more)).items():
                    self.send_header(name, str(value))
                self.end_headers()
                self.wfile.write(data)
            except OSError:  # who asked has gone
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    with Server(("127.0.0.1", port), Handler) as server:
        judge = Judge(f"http://127.0.0.1:{server.server_address[1]}/v1", say)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield judge
        finally:
            ended.set()
            server.shutdown()
            thread.join()
