"""A child process beside a real vLLM server, which may die under it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.command import ROOT, python_path
from tests.conftest import config_values, make_model, make_run
from tests.grpo_core.rollout.vllm_engine import PACKED
from tests.serving import free_ports, policy_server, wait_for_one


def served_run(folder: Path, num_servers: int = 1, **keys: Any) -> tuple[Path, list[int]]:
    """The configuration of a run that samples by vLLM servers, and their ports."""
    model = make_model(
        folder / "model", tie_word_embeddings=True, initializer_range=0.1, max_position_embeddings=512, **PACKED
    )
    ports = free_ports(num_servers)
    values = config_values(model, folder, engine="vllm-server", vllm_server_timeout=600.0, **keys)
    values["rollout"]["vllm_server_base_urls"] = [f"http://127.0.0.1:{port}" for port in ports]
    return make_run(folder / "run", values) / "config.toml", ports


def child_command(function: Callable[[Path], None], folder: Path) -> list[str]:
    """Calls the function with the folder."""
    code = f"import pathlib; from {function.__module__} import {function.__name__} as call"
    return [sys.executable, "-c", f"{code}; call(pathlib.Path({str(folder)!r}))"]


def found_beside_server(function: Callable[[Path], None], config: Path, port: int, folder: Path) -> Any:
    """What a function writes to FOLDER/found in a process of its own, beside a server whose process FOLDER/pid says;
    when that has died, another is started."""
    log = folder / "log"
    with log.open("w") as output:
        environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
        command = child_command(function, folder)
        child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    try:
        for _ in range(2):  # the second when the first was killed
            with policy_server(config, port, folder / "server.log") as server:
                (folder / "pid").write_text(str(server.pid))
                wait_for_one([server, child])
    finally:
        child.kill()
    assert child.wait() == 0, log.read_text() + (folder / "server.log").read_text()
    return json.loads((folder / "found").read_text())
