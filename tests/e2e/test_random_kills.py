"""Commands of which SIGKILL ends a random process at a random moment, again and again, end as undisturbed ones do.

$GRPO_KILLS: number of kills of each (default 3).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlflow
import psutil
import pytest

from benchmarks.command import python_path
from tests.conftest import make_model, write_config
from tests.e2e.place import metrics
from tests.processes import with_variables, words
from tests.rows import write_lines

pytestmark = pytest.mark.e2e

KILLS = int(os.environ.get("GRPO_KILLS", "3"))
MARK = "GRPO_TEST_OF_KILLS"  # environment variable by which all processes are found
SECONDS = 600
PROJECT = Path(__file__).parents[2]
TAUGHT = {
    "warm_start": {"demonstrations": "shown.jsonl", "batch_size": 8, "num_train_epochs": 2.0, "learning_rate": 1e-3},
    "teacher": {"model": "teacher"},
}


@dataclass
class Commands:
    """Runs `grpo` with a storage root of its own, and kills."""

    storage: Path
    rng: random.Random
    undisturbed_seconds: float = 0.0
    victims: list[str] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        path = python_path(self.storage.parent, PROJECT)
        return {**os.environ, "GRPO_STORAGE": str(self.storage), "PYTHONPATH": path, MARK: str(self.storage)}

    def processes(self) -> list[psutil.Process]:
        """All that run with this storage root."""
        return with_variables(**{MARK: str(self.storage)})

    def run(self, *arguments: str | Path, kill_after: float | None = None) -> tuple[int, str]:
        """Status and output of the command, of whose tree a random process is killed after some seconds; nothing that
        it has started is left."""
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli.main", *arguments],
            cwd=self.storage.parent,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if kill_after is not None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=kill_after)
            if there := self.processes():
                victim = self.rng.choice(there)
                self.victims.append(" ".join(words(victim)[:8]))
                with suppress(psutil.NoSuchProcess):
                    victim.kill()
        output, _ = process.communicate(timeout=SECONDS)
        deadline = time.monotonic() + 60
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, (self.victims, [words(it) for it in left], output)
        return process.returncode, output

    def undisturbed(self, *arguments: str | Path) -> None:
        begin = time.monotonic()
        status, output = self.run(*arguments)
        assert status == 0, output
        self.undisturbed_seconds = time.monotonic() - begin

    def disturbed(self, reset: Callable[[], Any], *arguments: str | Path) -> None:
        """Kill KILLS times, beginning again whenever the command has ended by itself; then to the end."""
        status = 1
        while len(self.victims) < KILLS:
            if status == 0:
                reset()
            status, output = self.run(*arguments, kill_after=self.rng.uniform(0.5, self.undisturbed_seconds))
        print(*self.victims, sep="\n")
        if status:
            status, output = self.run(*arguments)
            assert status == 0, (self.victims, output)


def _inputs(folder: Path, model: Path, sections: Mapping[str, Any], **train: Any) -> Path:
    write_lines(folder / "shown.jsonl", [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(10, 50)])
    make_model(folder / "teacher", initializer_range=0.1)
    return write_config(folder, model, {"name": "sums", **sections}, max_steps=6, save_steps=2, **train)


def _figures(run: Path) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, str]]:
    """Metrics of each update and of the evaluation, without times, and the hashes of all weights."""
    report = json.loads((run / "evaluation" / "report.json").read_text())
    weights = [file for stage in ("warm-start", "training") for file in (run / stage / "model").glob("*.safetensors")]
    hashes = {str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in weights}
    return metrics(run), {key: report[key] for key in ("key", "sets")}, hashes


def _results(storage: Path) -> dict[str, Any]:
    runs = {run.name: _figures(run) for run in sorted((storage / "runs").iterdir())}
    client = mlflow.MlflowClient(f"sqlite:///{storage / 'mlflow' / 'mlflow.db'}")
    versions = client.search_model_versions("name = 'sums'")
    candidate = client.get_model_version_by_alias("sums", "candidate").tags["run"]
    return {"runs": runs, "versions": sorted(it.tags["run"] for it in versions), "candidate": candidate}


def _both(tmp_path: Path, seed: int) -> tuple[Commands, Commands]:
    return tuple(Commands(tmp_path / name, random.Random(seed)) for name in ("undisturbed", "disturbed"))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("command", "train", "sections"),
    [
        (["sweep", "--grid", "train.learning_rate=0.01,0.02", "--seeds", "2"], {}, {}),
        (["run"], {"num_processes": 2, "sharding": "full", "per_device_train_batch_size": 4}, {}),
        (["run"], {}, TAUGHT),
    ],
    ids=["a sweep of 2 x 2", "a sharded training", "a warm start and a teacher"],
)
def test_a_pipeline_killed_at_random_ends_as_undisturbed_with_one_version_of_each_run(
    command: list[str], train: dict[str, Any], sections: dict[str, Any], tmp_path: Path, model_folder: Path
) -> None:
    undisturbed, disturbed = _both(tmp_path, seed=len(command))
    config = _inputs(tmp_path, model_folder, sections, **train)
    words = [command[0], config, *command[1:]]
    undisturbed.undisturbed(*words)
    expected = _results(undisturbed.storage)
    disturbed.undisturbed_seconds = undisturbed.undisturbed_seconds

    def begin_again() -> None:
        assert _results(disturbed.storage) == expected, disturbed.victims
        disturbed.storage = disturbed.storage.with_name(f"{disturbed.storage.name}-again")

    disturbed.disturbed(begin_again, *words)
    assert _results(disturbed.storage) == expected, disturbed.victims
    assert len(expected["versions"]) == len({*expected["versions"]}) == len(expected["runs"])


REGISTER = """
import sys
from tests.evaluations import fixed_samples, promotion_config, register_version
samples = fixed_samples({"base": [0] * 40, "trained": [1] * 30 + [0] * 10})
for model in sys.argv[1:]:
    register_version(model, samples, config=promotion_config(approval=True))
"""


def test_a_promotion_that_waits_for_approval_is_killed_at_random_and_ends_as_undisturbed(tmp_path: Path) -> None:
    commands = Commands(tmp_path / "storage", random.Random(1))
    models = ["undisturbed", *(f"disturbed-{number}" for number in range((KILLS + 1) // 2))]
    commands.storage.mkdir()
    register = [sys.executable, "-c", REGISTER, *models]
    subprocess.run(register, cwd=commands.storage, env=commands.environment, check=True)
    seconds = {}
    for model in models:
        for answer, status in ([], 1), (["--approve", "Ada"], 0):
            command, begin = ["promote", model, *answer], time.monotonic()
            if model != "undisturbed":
                commands.run(*command, kill_after=commands.rng.uniform(0, seconds[status]))
            ended, output = commands.run(*command)
            assert ended == status, (commands.victims, output)
            seconds.setdefault(status, time.monotonic() - begin)
    print(*commands.victims, sep="\n")
    client = mlflow.MlflowClient(f"sqlite:///{commands.storage / 'mlflow' / 'mlflow.db'}")

    def recorded(model: str) -> Any:
        registered = client.get_registered_model(model)
        history = [(it["version"], it["how"]) for it in json.loads(registered.tags["champion.history"])]
        [version] = client.search_model_versions(f"name = '{model}'")
        tags = {key: value for key, value in version.tags.items() if key.startswith("promotion.") and "at" not in key}
        return registered.aliases, registered.tags["champion.attempts"].partition("latest")[0], history, tags

    expected = recorded("undisturbed")
    assert expected[2] == [("1", "promoted")] and expected[3]["promotion.by"] == "Ada"
    for model in models:
        assert recorded(model) == expected, model
