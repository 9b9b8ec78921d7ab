"""A stand-in for the routes of the Hugging Face hub's HTTP API that an upload requests. The token gives the right to
write to repositories of `ada`, and files come in the commit itself. It is no test of the hub."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.web import Quiet, answering

TOKEN = "hf_of_the_test"


@dataclass
class Hub:
    """`refused`: beginning of the actions on a repository that are refused. `asked`: each request's method and path.
    `files`: by repository and path."""

    role: str = "write"
    address: str = ""
    refused: str = ""
    asked: list[str] = field(default_factory=list)
    made: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def answer(self, path: str, sent: bytes) -> tuple[int, Any]:
        if path == "/api/whoami-v2":
            return 200, {"name": "ada", "orgs": [], "auth": {"accessToken": {"role": self.role}}}
        if path == "/api/repos/create":
            self.made.append(json.loads(sent))
            name = f"{self.made[-1].get('organization') or 'ada'}/{self.made[-1]['name']}"
            self.files.setdefault(name, {})
            return 200, {"url": f"{self.address}/{name}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        name, _, action = path.removeprefix("/api/models/").partition("/")
        name, (owner, action) = f"{name}/{action.partition('/')[0]}", (name, action.partition("/")[2])
        if name not in self.files:
            return 404, {"error": "Repository not found"}
        if self.refused and action.startswith(self.refused):
            return 403, {"error": "not now"}
        if action == "auth-check/write":
            return (200, {}) if owner == "ada" else (403, {"error": "you may not write here"})
        if action.startswith("tree/"):
            return 200, [{"type": "file", "path": path, "size": 1, "oid": "1"} for path in self.files[name]]
        if action.startswith("preupload/"):
            paths = [each["path"] for each in json.loads(sent)["files"]]
            return 200, {"files": [{"path": each, "uploadMode": "regular", "shouldIgnore": False} for each in paths]}
        if action.startswith("commit/"):
            for line in map(json.loads, sent.splitlines()):
                if line["key"] == "deletedFile":
                    del self.files[name][line["value"]["path"]]
                if line["key"] == "file":
                    self.files[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return 200, {"commitUrl": f"{self.address}/{name}/commit/1", "commitOid": "1" * 40, "success": True}
        return 200, {"id": name, "sha": "1" * 40, "siblings": []}


@contextmanager
def hub(stand_in: Hub) -> Iterator[str]:
    """Address of the stand-in, until the body ends."""

    class Handler(Quiet):
        def do_GET(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = self.path.partition("?")[0]
            stand_in.asked.append(f"{self.command} {path}")
            known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            status, answer = stand_in.answer(path, sent) if known else (401, {"error": "Invalid credentials"})
            said = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(said)))
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()
            self.wfile.write(said)

        do_POST = do_GET

    with answering(Handler) as stand_in.address:
        yield stand_in.address
