"""A data set of the hub is read as its card says, unless that names files elsewhere: then nothing else is asked."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.web import Quiet, answering

COMMIT = "a" * 40
READ = """
import sys
from tasks.data.sources import Source, SourceError, load_source
for name in sys.argv[1:]:
    try:
        rows = load_source(Source("data.train", name, revision="v2"))
        print([row for frame in rows.slices() for row in frame["prompt"]])
    except SourceError as error:
        print(error)
"""


@contextmanager
def serving(data_sets: dict[str, dict[str, bytes]]) -> Iterator[tuple[str, list[str]]]:
    """A stand-in for the hub with the files of some data sets; its address, and the paths that it is asked for."""
    asked: list[str] = []

    class Hub(Quiet):
        def do_GET(self) -> None:
            asked.append(self.path)
            # /api/datasets/OWNER/NAME/WHAT/REVISION[/PATH] or /datasets/OWNER/NAME/resolve/REVISION/PATH
            parts = self.path.partition("?")[0].removeprefix("/api").split("/", 6)
            _, _, owner, name, what, _, within = [*parts, *[""] * (7 - len(parts))]
            files, is_api = data_sets.get(f"{owner}/{name}", {}), self.path.startswith("/api/")
            if is_api and what == "revision":
                self._answer(json.dumps({"id": f"{owner}/{name}", "sha": COMMIT, "siblings": []}).encode())
            elif is_api:  # tree, paths-info
                found = [
                    {"type": "file", "path": path, "oid": hashlib.sha1(body).hexdigest(), "size": len(body)}
                    for path, body in files.items()
                    if path.startswith(within)
                ]
                self._answer(json.dumps(found).encode())
            elif within in files:
                self._answer(files[within])
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Content-Length", "0")
                self.end_headers()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        do_HEAD = do_GET

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    with answering(Hub) as url:
        yield url, asked


def _configs(path: str) -> bytes:
    files = [{"split": "train", "path": ["rows.jsonl", path]}]
    return yaml.safe_dump({"configs": [{"config_name": "default", "data_files": files}]}).encode()


@pytest.mark.slow
def test_a_card_that_names_an_address_elsewhere_does_not_make_this_machine_ask_it(tmp_path: Path) -> None:
    rows = {f"{name}.jsonl": f'{{"prompt": "{name}"}}\n'.encode() for name in ("rows", "more", "left")}
    with serving({}) as (inside, asked_inside):
        data_sets = {
            "evil/card": {"README.md": b"---\n" + _configs(f"{inside}/x.jsonl") + b"---\n", **rows},
            "evil/standalone": {".huggingface.yaml": _configs(f"{inside}/x.jsonl"), **rows},
            "good/data": {"README.md": b"---\n" + _configs("mor*.jsonl") + b"---\n", **rows},
        }
        with serving(data_sets) as (hub, asked):
            environment = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
            command = [sys.executable, "-c", READ, *data_sets]
            said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    card, standalone, good = said.splitlines()
    assert f"README.md names '{inside}/x.jsonl', which is not in the data set: download" in card
    assert f".huggingface.yaml names '{inside}/x.jsonl', which is not in the data set: download" in standalone
    assert asked_inside == []
    assert good == "['rows', 'more']"
    assert any("/good/data/revision/v2" in path for path in asked)
