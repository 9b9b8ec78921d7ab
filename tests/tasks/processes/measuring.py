"""What a plan would find out by trying, from a stand-in for the process that tries."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tasks.processes import measure


class Machine:
    """Stands in for the process: what it was asked for, its environment, and what it prints or raises."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, answer: dict[str, Any]):
        self.asked: list[dict[str, Any]] = []
        self.printed = ["Loading weights: 100%", json.dumps(answer)]
        self.error: Exception | None = None
        self.seen: list[str | None] = []  # its GPUs
        monkeypatch.setattr(measure, "run_process", self.run_process)
        monkeypatch.setenv("GRPO_STORAGE", str(folder / "storage"))
        monkeypatch.delenv("GRPO_MEASURE")
        for name in ("model", "moved"):
            (folder / name).mkdir()
            (folder / name / "config.json").write_text("{}")

    def run_process(self, command: list[str], on_line: Any, env: dict[str, str], limit: float) -> None:
        self.asked.append(json.loads(command[2]))
        self.seen.append((os.environ | env).get("CUDA_VISIBLE_DEVICES"))
        for line in self.printed:
            on_line(line)
        if self.error:
            raise self.error
