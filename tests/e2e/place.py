"""A training sharded over two machines: where it runs, what it says, and what it ends with."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.command import python_path
from grpo_core.config.files import dump_config, parse_config
from grpo_core.planning.plan import make_plan, plan_inputs
from tests.conftest import config_values, make_run
from tests.processes import wait_for
from tests.serving import hear_ctrl_c

PROJECT = Path(__file__).parents[2]
SECONDS = 900.0  # of what has no limit of its own

# Stands still in its fourth rollout until it may go on, or is told to stop.
REWARD = """
import os, time
from grpo_core.training import interrupt
calls = []
def patient(completions, completion_ids):
    calls.append(1)
    if len(calls) == 4 and not os.path.exists(os.environ["MAY_GO_ON"]):
        print("stuck", flush=True)
        while not os.path.exists(os.environ["MAY_GO_ON"]) and not interrupt._told.to_stop:
            time.sleep(0.05)
    return [-float(len(ids)) for ids in completion_ids]
"""


class Started:
    """A process, `python -m` with these words, and what it has said."""

    def __init__(self, environment: dict[str, str], *words: str | Path):
        self.process = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=PROJECT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=hear_ctrl_c,
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def until(self, pattern: str) -> None:
        wait_for(lambda: self.said(pattern) or self.process.poll() is not None)
        assert self.said(pattern), self.text

    def said(self, pattern: str) -> bool:
        return re.search(pattern, self.text) is not None

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def end(self) -> int:
        code = self.process.wait(SECONDS)
        self.reader.join()
        return code


class Place:
    """Two machines, the run directories of trainings on them, and what one that nothing happens to ends with."""

    machines: Sequence[str]  # patterns of their names in the log

    def __init__(self, folder: Path, model: Path, environment: Mapping[str, str], launch: dict[str, Any]):
        self.folder, self.launch, self.go_on = folder, launch, folder / "go-on"
        (folder / "patience.py").write_text(REWARD)
        path = python_path(folder, PROJECT)
        self.environment = {**environment, "PYTHONPATH": path, "MAY_GO_ON": str(self.go_on)}
        values = config_values(model, folder, max_steps=8, save_steps=1, sharding="full", num_processes=2)
        self.values = {**values, "rewards": [{"function": "patience:patient"}]}
        make_run(folder / "local", self.values)

    def run(self, name: str, **train: Any) -> Path:
        """A run directory for the two machines; the present one, if there is one, with other keys."""
        values = {**self.values, "launch": self.launch}
        values["train"] = {**self.values["train"], "num_machines": 2, **train}
        run = self.folder / name
        if not run.exists():
            shutil.copytree(self.folder / "local", run, ignore=shutil.ignore_patterns("training"))
        config = parse_config(values)
        (run / "config.toml").write_text(dump_config(config))
        num_prompts = json.loads((run / "plan.json").read_text())["plan"]["num_prompts"]
        (run / "plan.json").write_text(json.dumps({"plan": asdict(make_plan(plan_inputs(config, num_prompts)))}))
        return run

    def start(self, run: Path) -> Started:
        """The stage train."""
        return Started(self.environment, "tests.e2e.train_on_hosts", run)

    def finish(self, run: Path) -> Started:
        """The stage train, which ends well."""
        stage = self.start(run)
        assert stage.end() == 0, stage.text
        return stage

    def cancel(self, run: Path) -> None:
        """The stage train, told to end in its fourth rollout: it saves first."""
        with standing_still(self, self.start(run)) as stage:
            stage.process.send_signal(signal.SIGINT)
            assert stage.end() != 0
            assert stage.said("told to stop, the checkpoint of step 3"), stage.text

    def undisturbed(self) -> list[dict[str, float]]:
        if not (self.folder / "local" / "training" / "result.json").exists():
            self.go_on.touch()
            self.finish(self.folder / "local")
            self.go_on.unlink()
        return metrics(self.folder / "local")


@contextmanager
def standing_still(place: Place, stage: Started) -> Iterator[Started]:
    """A training of which every process stands still in its fourth rollout."""
    try:
        for machine in place.machines:
            stage.until(rf"{machine}: (rank \d: )?stuck")
        yield stage
    finally:
        stage.process.kill()
        stage.process.wait()


def metrics(run: Path) -> list[dict[str, float]]:
    lines = (run / "training" / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if "time" not in key} for line in lines]


def resumed_at_step(run: Path) -> int:
    return json.loads((run / "training" / "result.json").read_text())["resumed_at_step"]
