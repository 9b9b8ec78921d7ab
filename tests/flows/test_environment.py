"""What goes to a server on this machine stays there, whatever proxies the environment names; what lies in the working
folder hides no module from the processes of a command."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flows.serving.environment import configure
from flows.serving.find_server import ask
from grpo_core.errors import GrpoError
from tests.held import held
from tests.serving import free_ports
from tests.web import Quiet, answering


@contextmanager
def serving(status: int) -> Iterator[tuple[str, list[str]]]:
    """A server's address, and the paths that it has been asked for, until the body ends."""
    asked = []

    class Handler(Quiet):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b"{}")

        do_POST = do_CONNECT = do_GET

    with answering(Handler) as url:
        yield url, asked


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[None]:
    """An environment without proxies, put back afterwards."""
    with held(os.environ, {"GRPO_STORAGE": str(tmp_path)}):
        for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
            del os.environ[name]
        yield


@pytest.mark.usefixtures("environment")
def test_a_password_in_the_address_of_prefect_is_refused_without_saying_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "https://grpo:hidden@prefect.internal/api")
    with pytest.raises(GrpoError, match=r"PREFECT_API_URL contains a user, .* set PREFECT_API_AUTH_STRING") as error:
        configure()
    assert "hidden" not in str(error.value)


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_prefect_and_mlflow_on_this_machine_are_asked_through_no_proxy(host: str) -> None:
    from mlflow import MlflowClient
    from prefect.client.orchestration import SyncPrefectClient

    with serving(200) as (url, asked), serving(503) as (proxy, passed_on):
        os.environ.update(http_proxy=proxy, HTTP_PROXY=proxy, ALL_PROXY=proxy)
        configure()
        url = url.replace("127.0.0.1", host)
        assert ask(f"{url}/api")
        assert not ask(f"http://{host}:{free_ports(1)[0]}/api")  # not there; the proxy answers
        with SyncPrefectClient(f"{url}/api") as prefect:
            assert prefect.api_healthcheck() is None
        MlflowClient(url).get_experiment("0")
        os.environ.update(http_proxy="http://127.0.0.1:9", HTTP_PROXY="http://127.0.0.1:9")  # not there either
        assert ask(f"{url}/api")
    assert passed_on == []
    assert {path.split("?")[0] for path in asked} >= {"/api/health", "/api/2.0/mlflow/experiments/get"}


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    "named", [{}, {"NO_PROXY": "a.example, .b"}, {"no_proxy": "a.example"}, {"NO_PROXY": "c", "no_proxy": "a.example"}]
)
def test_hosts_that_need_no_proxy_already_still_need_none(named: dict[str, str]) -> None:
    os.environ.update(named)
    for _ in range(2):  # a process, and one that it starts
        configure()
        for host in ["127.0.0.1", "localhost", *(["a.example"] if named else [])]:
            assert urllib.request.proxy_bypass(f"{host}:80"), host
        for name, hosts in named.items():
            assert set(hosts.replace(" ", "").split(",")) < set(os.environ[name].split(","))
    assert not urllib.request.proxy_bypass("d.example")
    os.environ.update(no_proxy="*", NO_PROXY="*")
    configure()
    assert urllib.request.proxy_bypass("d.example"), "* means all hosts"


@pytest.mark.slow
def test_a_file_of_the_working_folder_hides_no_module_from_what_a_command_starts(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('it was imported')\n")
    code = (
        "import subprocess, sys; from flows.serving.environment import configure; configure()\n"
        "python = [sys.executable, '-m', 'tasks.processes.supervise', '1', sys.executable, '-c', 'import random']\n"
        "sys.exit(subprocess.run(python, stdin=subprocess.DEVNULL).returncode)"
    )
    environment = {**os.environ, "GRPO_STORAGE": str(tmp_path / "storage")}
    del environment["PYTHONSAFEPATH"]
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("environment")
def test_what_prefect_keeps_is_in_its_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    configure()
    from prefect.settings import Settings

    settings = Settings()
    home = tmp_path / "prefect"
    assert settings.home == home
    assert settings.results.local_storage_path == home / "storage"
    assert settings.server.memo_store_path == home / "memo_store.toml"


@pytest.mark.usefixtures("environment")
def test_a_file_that_is_gone_when_it_is_looked_at_is_no_error(tmp_path: Path) -> None:
    """As a database's journal may be, while a server works with it."""
    (tmp_path / "prefect").mkdir()
    (tmp_path / "prefect" / "prefect.db-journal").symlink_to("gone")
    configure()
