"""Servers on other machines, over ssh or in a scheduler's job, without vLLM, sshd and scheduler; tests/e2e has them:
test_servers_on_hosts.py and test_slurm.py."""

from __future__ import annotations

import logging
import logging.handlers
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from benchmarks.command import python_path
from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.planning.forecast import count_gpus
from grpo_core.planning.hardware import Gpu
from grpo_core.rollout.vllm.secret import with_secret
from grpo_core.rollout.vllm.serve import ADDRESSES
from tasks.processes import launch, machine, vllm_servers
from tasks.processes.launchers.machines import Machine
from tasks.processes.machine import free_port
from tasks.processes.run import ProcessError, run_together
from tasks.processes.vllm_servers import servers
from tasks.stages.errors import StageError
from tasks.stages.run import Context
from tests.conftest import config_values, with_keys
from tests.processes import existing, runs
from tests.tasks.processes.test_launch import FAKE

pytestmark = pytest.mark.served

# Stands for vLLM: answers its process's number, and what it was started with.
STUB = """
import http.server, json, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.headers["Authorization"] == "Bearer " + os.environ["GRPO_VLLM_SECRET"] else 401)
        self.end_headers()
        self.wfile.write(json.dumps([os.getpid(), int(sys.argv[3])]).encode())
print("the server's own words", flush=True)
print("its allocator", os.environ.get("PYTORCH_CUDA_ALLOC_CONF"), flush=True)
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An `ssh` that runs commands here, for hosts with a name that begins with "up", unless the folder has a file of
    the name; and a server without vLLM."""
    away = f'[ -e "{tmp_path}/$host" ] && {{ echo "ssh: $host: No route to host" >&2; exit 255; }}\ncd /'
    fake = FAKE.replace("env -i", "env -i SSH_CONNECTION='127.0.0.1 1 127.0.0.1 22'").replace("cd /", away, 1)
    (tmp_path / "ssh").write_text(fake)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", python_path(Path(machine.__file__).parents[2]))
    monkeypatch.setattr(vllm_servers, "serve", lambda run, *told: ["-c", STUB, *(str(each) for each in told)])
    monkeypatch.setattr(vllm_servers, "PAUSE_SECONDS", 0.0)
    return tmp_path


def _config(folder: Path, *hosts: str, launch: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    values = config_values(folder / "model", folder, engine="vllm-server")
    return with_keys({**values, "launch": {"server_hosts": list(hosts), **(launch or {})}}, **keys)


class Servers:
    """The servers of a stage, as its training finds them."""

    def __init__(self, environment: dict[str, str], said: queue.SimpleQueue[logging.LogRecord]):
        self.environment, self.said = environment, said

    def until(self, words: str) -> str:
        """The next line of the log that has these words."""
        while words not in (line := self.said.get(timeout=60).getMessage()):
            pass
        return line

    def ask(self) -> list[tuple[psutil.Process, int]]:
        """Each server's process, and the number of its first GPU."""
        urls = Path(self.environment[ADDRESSES]).read_text().split()
        with httpx2.Client(headers=with_secret(self.environment), trust_env=False) as client:
            answers = [client.get(url).json() for url in urls]
        return [(psutil.Process(pid), gpu) for pid, gpu in answers]


@contextmanager
def serving(values: dict[str, Any], folder: Path) -> Iterator[Servers]:
    said: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    log = logging.Logger("stage")
    log.addHandler(logging.handlers.QueueHandler(said))
    before = set(psutil.Process().children(recursive=True))
    with servers(Context(parse_config(values), folder, folder), log) as environment:
        yield Servers(environment, said)
    assert not set(psutil.Process().children(recursive=True)) - before
    assert not Path(environment[ADDRESSES]).exists()


@pytest.mark.e2e
def test_a_server_is_started_again_on_its_host_or_on_a_spare_one_and_the_training_learns_its_address(
    hosts: Path,
) -> None:
    with serving(_config(hosts, "up1", "up2"), hosts) as found:
        [(first, _)] = found.ask()
        first.send_signal(signal.SIGKILL)
        assert "on up1 ended with status 137 (SIGKILL)" in found.until("is started again")
        assert found.until("is up").endswith("on up1 is up")
        [(second, _)] = found.ask()
        (hosts / "up1").touch()
        second.kill()
        assert found.until("is up").endswith("on up2 is up")
        [(third, _)] = found.ask()
        (hosts / "up1").unlink()
        third.kill()
        assert found.until("is up").endswith("on up2 is up")
        [(fourth, _)] = found.ask()
        assert len({first.pid, second.pid, third.pid, fourth.pid}) == 4
    assert not fourth.is_running()
    assert {file.name for file in hosts.glob("vllm-server*")} == {"vllm-server-0-up1.log", "vllm-server-0-up2.log"}


def test_an_address_that_could_not_be_written_is_written_later(hosts: Path) -> None:
    with serving(_config(hosts, "up1"), hosts) as found:
        [(first, _)] = found.ask()
        (hosts / "vllm-servers.new").mkdir()
        first.kill()
        found.until("is up, and the training cannot be told")
        (hosts / "vllm-servers.new").rmdir()
        while not found.until("is up").endswith("on up1 is up"):
            pass
        assert found.ask()[0][0] != first


def test_each_server_has_a_host_and_counts_from_the_gpus_that_are_its_own_there(hosts: Path) -> None:
    values = _config(
        hosts,
        *("up1", "down2", "up3"),
        launch={"launcher": "ssh", "hosts": ["me@up3", "up4"]},
        vllm_num_servers=2,
        num_processes=4,
        num_machines=2,
    )
    (hosts / "ssh").write_text(
        (hosts / "ssh").read_text().replace('"hostname 10.0.0.${3: -1}"', '"hostname 127.0.0.1"')
    )
    with serving(values, hosts) as found:
        assert [gpu for _, gpu in found.ask()] == [0, 0]


def test_too_few_hosts_for_the_servers_are_refused_with_what_ssh_says(hosts: Path) -> None:
    values = _config(hosts, "up1", "down2", vllm_num_servers=2)
    expected = r"0 of the 1 hosts in launch.server_hosts .* but one for a server is needed. down2: ssh: .*No route"
    before = psutil.Process().children(recursive=True)
    with pytest.raises(StageError, match=expected), serving(values, hosts):
        raise AssertionError("nothing is served")
    assert not {*psutil.Process().children(recursive=True)} - {*before}


def test_a_training_that_fails_while_a_server_is_down_names_its_host(hosts: Path) -> None:
    expected = r"^the vLLM server at http://127.0.0.1:\d+ on up1 ended with status 137 \(SIGKILL\)\. it is away$"
    with pytest.raises(ProcessError, match=expected) as raised, serving(_config(hosts, "up1"), hosts) as found:
        (hosts / "up1").touch()
        found.ask()[0][0].kill()
        assert "up1: ssh: up1: No route to host" in found.until("cannot be started again")
        raise ProcessError("it is away", restartable=True)
    assert raised.value.restartable


@pytest.mark.parametrize(
    ("launch", "keys", "message"),
    [
        ({}, {"engine": "transformers"}, r"launch.server_hosts=\['a', 'b'\] are for servers .* engine='transformers'"),
        ({}, {"vllm_server_base_urls": ["http://c:1"]}, r"without vllm_server_base_urls.*\['http://c:1'\]"),
        ({"server_hosts": ["a", "me@a"]}, {}, "names a machine twice"),
        ({}, {"vllm_num_servers": 3}, r"rollout.vllm_num_servers=3 with .*a machine gets one server"),
        ({}, {"vllm_weight_transfer": "ipc"}, "'ipc' is for a server on the training's own"),
        (
            {"server_hosts": [], "launcher": "slurm"},
            {"vllm_weight_transfer": "ipc"},
            "'ipc' is for a server on the training's own machine",
        ),
        ({}, {"vllm_weight_transfer": "shared_memory"}, "'shared_memory' is for a server on the training's own"),
        (
            {"server_hosts": [], "launcher": "ssh", "hosts": ["a"]},
            {},
            "launch.launcher='ssh': .* name machines for them in launch.server_hosts",
        ),
        (
            {"launcher": "ssh", "hosts": ["a", "b"]},
            {"sharding": "full", "num_processes": 2, "num_machines": 2},
            "train.sharding='full' and train.num_machines=2: whole weights .* memory of one machine",
        ),
    ],
)
def test_servers_that_cannot_be_placed_are_refused(
    tmp_path: Path, launch: dict[str, Any], keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        parse_config(_config(tmp_path, "a", "b", launch=launch, **keys))


# Asks both servers, kills the first, and asks until another process answers there.
TRAINING = """
import os, signal, time, httpx2
from grpo_core.rollout.vllm.secret import with_secret
from grpo_core.rollout.vllm.serve import read_addresses
client = httpx2.Client(headers=with_secret(), trust_env=False)
def ask(url):
    while True:
        try:
            return client.get(url).raise_for_status().json()[0]
        except httpx2.TransportError:
            time.sleep(0.05)
first, second = read_addresses()
pid, other = ask(first), ask(second)
os.kill(pid, signal.SIGKILL)
print("allocator", os.environ.get("PYTORCH_CUDA_ALLOC_CONF"), flush=True)
print("served again", ask(first) != pid, pid, other, flush=True)
"""


def _job(launcher: str = "slurm", hosts: list[str] | None = None, **keys: Any) -> RunConfig:
    launch = {"launcher": launcher, "server_hosts": hosts or [], "hosts": ["a"], "kubernetes": "job.yaml"}
    values = config_values(Path("model"), Path("data"), **{"engine": "vllm-server", **keys})
    return parse_config(values | {"launch": launch})


@pytest.mark.parametrize(
    ("config", "machines", "elsewhere"),
    [
        (_job(), 2, True),
        (_job("kubernetes", vllm_num_servers=3), 4, True),
        (_job(hosts=["c"]), 1, True),
        (_job("ssh", hosts=["c"]), 1, True),
        (_job("local"), 1, False),
        (_job(engine="transformers"), 1, False),
        (_job(vllm_server_base_urls=["http://c:1"]), 1, False),
    ],
)
def test_a_job_has_a_further_machine_for_each_server_that_has_no_other_place(
    config: RunConfig, machines: int, elsewhere: bool
) -> None:
    assert (config.num_machines, config.servers_elsewhere) == (machines, elsewhere)


def test_the_gpus_of_servers_in_a_job_are_not_counted_on_this_machine() -> None:
    found = count_gpus(_job(vllm_tensor_parallel_size=8), Gpu("H100", 80.0, (9, 0), per_machine=1))
    assert found["servers"] == 8 and found["how"].endswith("on further machines of the job, one each")


def test_servers_serve_a_training_are_restarted_where_they_are_and_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = [Machine(name, [], "127.0.0.1", free_port(), grace=5.0) for name in ("a", "b", "c")]

    @contextmanager
    def slurm(config: RunConfig, *_: Any) -> Iterator[list[Machine]]:
        assert config.num_machines == len(machines)
        yield machines

    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(launch.LAUNCHERS, "slurm", slurm)
    monkeypatch.setattr(launch, "serve", lambda run, *told: ["-c", STUB, *map(str, told)])
    (tmp_path / "training.py").write_text(TRAINING)
    lines: list[str] = []
    folder = tmp_path / "output"
    folder.mkdir()
    launch.launch(_job(vllm_num_servers=2), [str(tmp_path / "training.py")], lines.append, folder)
    [again] = [line for line in lines if line.startswith("b: ")]
    assert again.endswith("ended with status 137 (SIGKILL) and is started again")
    [done] = [line for line in lines if line.startswith("served again True")]
    assert not any(_runs(int(pid)) for pid in done.split()[-2:])
    assert not [line for line in lines if "own words" in line]
    assert (folder / "vllm-server-0-b.log").read_text().count("own words") == 2
    assert [line for line in lines if line.startswith("allocator")] == ["allocator expandable_segments:True"]
    assert "its allocator None" in (folder / "vllm-server-0-b.log").read_text(), "which suits a training alone"
    assert sorted(file.name for file in folder.iterdir()) == ["vllm-server-0-b.log", "vllm-server-1-c.log"]


def _runs(pid: int) -> bool:
    return any(map(runs, existing([pid])))


FOREVER = "import signal; signal.pause()"


def test_what_is_endless_ends_with_the_others_and_its_loss_is_theirs() -> None:
    run_together({"a": ["-c", ""], "server": ["-c", FOREVER]}, lambda *_: None, endless=["server"])
    killed = "import os; os.kill(os.getpid(), 9)"
    with pytest.raises(ProcessError, match="machine server ended with status 137") as failed:
        run_together({"a": ["-c", FOREVER], "server": ["-c", killed]}, lambda *_: None, endless=["server"])
    assert failed.value.restartable
    with pytest.raises(ProcessError, match="machine a ended with status 3"):
        run_together(
            {"a": ["-c", "raise SystemExit(3)"], "server": ["-c", FOREVER]}, lambda *_: None, endless=["server"]
        )


# Leaves a process behind that is deaf to SIGTERM, as vLLM's engine may be; both say their ids.
LEAVING = """
import subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print(os.getpid(), flush=True); signal.pause()"], start_new_session=True)
left.wait()
"""


def test_what_a_server_has_left_is_killed_before_it_starts_again() -> None:
    command = [sys.executable, "-m", "tasks.processes.restarting", "-c", LEAVING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = psutil.Process(int(process.stdout.readline()))
        parent = left.parent()
        assert parent is not None
        parent.kill()
        assert process.stdout.readline().endswith("ended with status 137 (SIGKILL) and is started again\n")
        again = int(process.stdout.readline())
        assert again != left.pid and not _runs(left.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 143
        os.kill(again, signal.SIGKILL)
