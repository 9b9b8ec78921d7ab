"""vLLM servers on further machines of a job, without vLLM and without a scheduler; tests/e2e/test_slurm.py has both."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from grpo_core.planning.forecast import count_gpus
from grpo_core.planning.hardware import Gpu
from tasks.processes import launch
from tasks.processes.launchers.machines import Machine
from tasks.processes.machine import free_port
from tasks.processes.run import ProcessError, run_together
from tests.conftest import config_values
from tests.processes import existing, runs

pytestmark = pytest.mark.served

# Answers its process's number to whichever knows the secret.
SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.headers["Authorization"] == "Bearer " + os.environ["GRPO_VLLM_SECRET"] else 401)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())
print("the server's own words", flush=True)
print("its allocator", os.environ.get("PYTORCH_CUDA_ALLOC_CONF"), flush=True)
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""
# Asks both servers, kills the first, and asks until another process answers there.
TRAINING = """
import os, signal, time, httpx2
from grpo_core.rollout.vllm.secret import with_secret
from grpo_core.rollout.vllm.serve import read_addresses
client = httpx2.Client(headers=with_secret(), trust_env=False)
def ask(url):
    while True:
        try:
            return int(client.get(url).raise_for_status().text)
        except httpx2.TransportError:
            time.sleep(0.05)
first, second = read_addresses()
pid, other = ask(first), ask(second)
os.kill(pid, signal.SIGKILL)
print("allocator", os.environ.get("PYTORCH_CUDA_ALLOC_CONF"), flush=True)
print("served again", ask(first) != pid, pid, other, flush=True)
"""


def _config(launcher: str = "slurm", hosts: list[str] | None = None, **keys: Any) -> RunConfig:
    launch = {"launcher": launcher, "server_hosts": hosts or [], "hosts": ["a"], "kubernetes": "job.yaml"}
    values = config_values(Path("model"), Path("data"), **{"engine": "vllm-server", **keys})
    return parse_config(values | {"launch": launch})


@pytest.mark.parametrize(
    ("config", "machines", "elsewhere"),
    [
        (_config(), 2, True),
        (_config("kubernetes", vllm_num_servers=3), 4, True),
        (_config(hosts=["c"]), 1, True),
        (_config("ssh", hosts=["c"]), 1, True),
        (_config("local"), 1, False),
        (_config(engine="transformers"), 1, False),
        (_config(vllm_server_base_urls=["http://c:1"]), 1, False),
    ],
)
def test_a_job_has_a_further_machine_for_each_server_that_has_no_other_place(
    config: RunConfig, machines: int, elsewhere: bool
) -> None:
    assert (config.num_machines, config.servers_elsewhere) == (machines, elsewhere)


def test_the_gpus_of_servers_in_a_job_are_not_counted_on_this_machine() -> None:
    found = count_gpus(_config(vllm_tensor_parallel_size=8), Gpu("H100", 80.0, (9, 0), per_machine=1))
    assert found["servers"] == 8 and found["how"].endswith("on further machines of the job, one each")


def test_weights_do_not_go_to_another_machine_s_memory() -> None:
    with pytest.raises(ConfigError, match="'ipc' is for a server on the training's own machine"):
        _config(vllm_weight_transfer="ipc")


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
    monkeypatch.setattr(launch, "serve", lambda run, *told: ["-c", SERVER, *map(str, told)])
    (tmp_path / "training.py").write_text(TRAINING)
    lines: list[str] = []
    folder = tmp_path / "output"
    folder.mkdir()
    launch.launch(_config(vllm_num_servers=2), [str(tmp_path / "training.py")], lines.append, folder)
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
            {"a": ["-c", "raise SystemExit(3)"], "server": ["-c", FOREVER]},
            lambda *_: None,
            endless=["server"],
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
