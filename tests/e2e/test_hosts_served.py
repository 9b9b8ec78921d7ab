"""A training sharded over two of three hosts, started and cancelled as in Prefect's UI: a host that is gone is replaced
by the spare one, and nothing is left anywhere."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_core.config.files import dump_config, parse_config
from tests.conftest import write_data
from tests.e2e.hosts import Host, some_hosts
from tests.e2e.place import metrics, resumed_at_step
from tests.e2e.test_hosts import Hosts
from tests.processes import wait_for
from tests.serving import Served, grpo_serve, prefect_server

pytestmark = pytest.mark.e2e


class ServedPlace(Hosts):
    """Three hosts, and a Prefect server whose runs train on two of them."""

    server: Served

    def prepare(self) -> None:
        """The run directory `template`, validated and planned."""
        write_data(self.folder)
        self._configure("template")
        for stage in ("validate", "plan"):
            done = self.server.wait(self.server.trigger(f"{stage}/local", run="template"))
            assert done["state_type"] == "COMPLETED", self.server.messages(done["id"])

    def train(self, name: str) -> str:
        """Id of a flow run that trains, of which every process stands still in its fourth rollout."""
        runs = self.server.storage / "runs"
        shutil.copytree(runs / "template", runs / name)
        self._configure(name)
        run_id = self.server.trigger("train/local", run=name)
        logs = [self.partial(name) / f"{host.name}.log" for host in self.hosts[:2]]
        wait_for(lambda: all(log.exists() and "stuck" in log.read_text() for log in logs))
        return run_id

    def partial(self, name: str) -> Path:
        return self.server.storage / "runs" / name / "training.partial"

    def _configure(self, name: str) -> None:
        train = {**self.values["train"], "num_machines": 2, "max_restarts": 1}
        folder = self.server.storage / "runs" / name
        folder.mkdir(parents=True, exist_ok=True)
        config = parse_config({**self.values, "name": name, "launch": self.launch, "train": train})
        (folder / "config.toml").write_text(dump_config(config))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[ServedPlace]:
    folder = tmp_path_factory.mktemp("served")
    with some_hosts(folder, "alpha", "beta", "gamma") as (hosts, environment):
        place = ServedPlace(folder, model_folder, hosts, environment)
        (folder / "storage").mkdir()
        variables: dict[str, Any] = {name: place.environment[name] for name in ("PATH", "PYTHONPATH", "MAY_GO_ON")}
        with prefect_server(folder / "storage", **variables) as place.server, grpo_serve(place.server):
            place.prepare()
            yield place


@pytest.fixture
def place(shared: ServedPlace) -> ServedPlace:
    shared.go_on.unlink(missing_ok=True)
    return shared


def test_a_training_cancelled_by_the_api_saves_and_leaves_nothing_on_any_host(place: ServedPlace) -> None:
    run_id = place.train("cancelled")
    place.server.cancel(run_id)
    place.server.wait(run_id, "CANCELLED")
    place.until_ended()
    assert "train was interrupted, 3 of 8 updates saved" in place.server.messages_with(run_id, "updates saved")
    assert place.server.get("/v2/concurrency_limits/grpo-training")["active_slots"] == 0


def _switched_off(host: Host) -> None:
    """Its address answers no more, in the tests after this one neither."""
    for process in host.processes():
        with suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.parametrize(
    "fault", [Host.freeze, Host.unplug, _switched_off], ids=lambda fault: fault.__name__.strip("_")
)
def test_a_host_that_is_gone_is_replaced_by_the_spare_one(place: ServedPlace, fault: Callable[[Host], None]) -> None:
    name, beta = fault.__name__.strip("_"), place.hosts[1]
    run_id = place.train(name)
    fault(beta)
    place.go_on.touch()
    assert place.server.wait(run_id)["state_name"] == "Completed", place.server.messages(run_id)
    said = place.server.messages_with(run_id, "restart 1 of 1 (train.max_restarts): machine")
    assert "restart 2" not in said
    beta.plug_in()
    beta.thaw()
    run = place.server.storage / "runs" / name
    assert (run / "training" / "gamma.log").exists()
    assert resumed_at_step(run) == 3
    assert metrics(run) == place.undisturbed()
    place.until_ended()
