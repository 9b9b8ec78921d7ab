"""A server that answers as `vllm serve` does to what a teacher's server is asked, from a transformers model."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import transformers


@dataclass
class TeacherServer:
    """`said`: what was asked, by path; `wrong`: changes the answer to a path, or raises to give none."""

    url: str
    name: str
    length: int
    said: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    wrong: Callable[[str, int, dict[str, Any]], dict[str, Any]] = lambda path, number, answer: answer
    key: str = ""


class Refusal(Exception):
    """Answer with this status; None: close the connection."""

    def __init__(self, status: int | None, text: str = "refused"):
        self.status, self.text = status, text


@contextmanager
def teacher_server(folder: Path, name: str = "") -> Iterator[TeacherServer]:
    """The model of a folder, under its path unless it has a `name`, until the body ends."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    lock = threading.Lock()  # torch's threads do not get faster by more of them

    def answer(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/models":
            adapter = {"id": "adapter", "root": "elsewhere", "parent": server.name, "max_model_len": None}
            own = {"id": server.name, "root": str(folder), "parent": None, "max_model_len": server.length}
            return {"data": [adapter, own]}
        if path == "/health":
            return {}
        if body["model"] != server.name:
            raise Refusal(404, f"The model `{body['model']}` does not exist.")
        if path == "/detokenize":
            return {"prompt": tokenizer.decode(body["tokens"])}
        ids = body["prompt"]
        if max(ids) >= model.config.vocab_size:
            raise Refusal(400, f"Token id {max(ids)} is out of vocabulary")
        if len(ids) + body["max_tokens"] > server.length:
            raise Refusal(400, "longer than the maximum model length")
        assert (body["max_tokens"], body["prompt_logprobs"]) == (1, 0)
        with lock, torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        found = [{str(token): {"logprob": row[token].item()}} for token, row in zip(ids[1:], logprobs, strict=True)]
        return {"choices": [{"text": "", "prompt_logprobs": [None, *found]}]}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
            with lock:
                number = sum(path == self.path for path, _ in server.said)
                server.said.append((self.path, body))
            try:
                if server.key and self.headers["Authorization"] != f"Bearer {server.key}":
                    raise Refusal(401, "Unauthorized")
                status, text = 200, json.dumps(server.wrong(self.path, number, answer(self.path, body)))
            except Refusal as refusal:
                if refusal.status is None:
                    self.connection.close()
                    return
                status, text = refusal.status, refusal.text
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            if 300 <= status < 400:
                self.send_header("Location", "https://elsewhere")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        length = model.config.max_position_embeddings
        server = TeacherServer(f"http://127.0.0.1:{http.server_port}", name or str(folder), length)
        threading.Thread(target=partial(http.serve_forever, 0.01), daemon=True).start()
        try:
            yield server
        finally:
            http.shutdown()
