"""One `grpo up` for all tests of this folder: what they trigger by its API and what they run in their own process
report to the same servers."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_core.config.base import flatten
from tasks.stages import table
from tests.conftest import small_quickstart, write_inputs
from tests.serving import STOP_SECONDS, Served, serving

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.toml"
STAGES = [stage.name for stage in table.STAGES]
TaskStates = Callable[..., list[tuple[str, str]]]


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`grpo up` over a storage root and presets of its own. Ctrl-C ends it, and nothing of it stays."""
    configs = tmp_path_factory.mktemp("project") / "configs"
    shutil.copytree(Path(__file__).parents[2] / "configs", configs)
    with serving(tmp_path_factory.mktemp("served") / "[a] *", GRPO_CONFIGS=str(configs)) as servers:
        yield servers
        started = psutil.Process(servers.process.pid).children(recursive=True)
        said = [len(log.read_text()) for log in servers.logs]
        os.killpg(servers.process.pid, signal.SIGINT)  # a terminal sends it to all of the foreground's process group
        assert servers.process.wait(STOP_SECONDS) == 0
        assert not psutil.wait_procs(started, STOP_SECONDS)[1]
        added = [log.read_text()[before:] for log, before in zip(servers.logs, said, strict=True)]
        assert not [text for text in added if "Traceback" in text]


@pytest.fixture(scope="package")
def storage(served: Served) -> Iterator[Path]:
    """The servers' storage root, and this process's flows report to them."""
    ours = {"GRPO_STORAGE": str(served.storage), "PREFECT_HOME": served.environment["PREFECT_HOME"]}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ours.items():
            patch.setenv(name, value)
        from flows.serving.environment import configure

        configure()
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with temporary_settings({PREFECT_API_URL: served.environment["PREFECT_API_URL"]}):
            yield served.storage


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="session")
def changes(inputs: Path) -> dict[str, Any]:
    return _changes(inputs)


def _changes(inputs: Path) -> dict[str, Any]:
    train = {"max_steps": 4, "save_steps": 2, "eval_steps": 4}
    return small_quickstart("small", inputs, train, launch={"gpu_hour_price": 2.0})


@pytest.fixture(scope="module")
def task_states(served: Served) -> TaskStates:
    """(task, state) of the newest flow run of a name, in the order in which they ran, once `count` have ended."""

    def found(name: str, count: int = len(STAGES)) -> list[tuple[str, str]]:
        [run] = served.filter(
            "flow_runs", flow_runs={"name": {"any_": [name]}}, sort="EXPECTED_START_TIME_DESC", limit=1
        )
        return served.tasks(run["id"], count)

    return found


def overrides_of(inputs: Path, *overrides: str) -> list[str]:
    """Those of the fixture `changes`, and further ones."""
    return [*(f"{key}={value}" for key, value in flatten(_changes(inputs)).items()), *overrides]


def run_pipeline(inputs: Path, *overrides: str) -> Path:
    from flows.parameters.form import changes_from_overrides
    from flows.pipeline import pipeline

    return pipeline("quickstart", changes_from_overrides(CONFIG, overrides_of(inputs, *overrides)))


@pytest.fixture(scope="package")
def triggered(served: Served, changes: dict[str, Any]) -> dict[str, Any]:
    """Prefect's flow run of the whole pipeline, as the form starts it."""
    return served.wait(served.trigger("pipeline/local", preset="quickstart", changes=changes))


@pytest.fixture(scope="package")
def finished(triggered: dict[str, Any], storage: Path) -> Path:
    """Its run directory. What tests run again in their own process has the same configuration, given as by `--set`."""
    return storage / "runs" / triggered["name"]


def mlflow_run_of(finished: Path) -> Any:
    from tasks.tracking.runs import connect

    return connect().get_run(json.loads((finished / "registration.json").read_text())["mlflow_run_id"])


def accuracy_of(report: dict[str, Any]) -> dict[str, float]:
    return report["sets"]["held-out"]["policies"]["trained"]["accuracy"]
