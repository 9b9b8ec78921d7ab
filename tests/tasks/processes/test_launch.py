"""Processes are started as configured, on this machine or on others, and a failure is put down to its cause."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_core.config.files import parse_config
from grpo_core.config.launch import host_name
from grpo_core.config.run import RunConfig
from grpo_core.config.training import TrainConfig
from grpo_core.errors import LOST_PEER
from tasks.processes import machine
from tasks.processes.launch import LAUNCHERS, launch, process_environment, torchrun
from tasks.processes.launchers import ssh as ssh_launcher
from tasks.processes.launchers.ssh import remote_command, ssh
from tasks.processes.ranks import find_cause, interface_to
from tasks.processes.run import LOST, ProcessError, run_together
from tasks.stages.errors import StageError
from tests.conftest import config_values

pytestmark = pytest.mark.served


def _config(launch: dict[str, Any] | None = None, **keys: Any) -> RunConfig:
    return parse_config(config_values(Path("model"), Path("data"), **keys) | {"launch": launch or {}})


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that sets up neither threads nor torch's allocator."""
    for name in ("OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("bare")
def test_one_process_is_started_without_a_launcher_with_the_environment_that_it_would_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config()
    show = ["-c", "import os, sys; print(os.environ['OMP_NUM_THREADS'], os.environ['ACCELERATE_MIXED_PRECISION'])"]
    lines: list[str] = []
    launch(config, show, lines.append, tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    launch(config, show, lines.append, tmp_path)
    assert lines == [f"{os.cpu_count()} no", "3 no"]


@pytest.mark.usefixtures("bare")
def test_the_allocator_s_segments_grow_unless_the_user_or_ipc_say_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "PYTORCH_CUDA_ALLOC_CONF"
    assert process_environment(_config())[name] == "expandable_segments:True"
    assert name not in process_environment(_config(engine="vllm-server", vllm_weight_transfer="ipc"))
    for own in (name, "PYTORCH_ALLOC_CONF"):
        with monkeypatch.context() as patch:
            patch.setenv(own, "max_split_size_mb:512")
            assert name not in process_environment(_config(offload="optimizer"))


@pytest.mark.usefixtures("bare")
def test_page_locked_memory_of_what_is_offloaded_is_not_rounded_up() -> None:
    setting = process_environment(_config(offload="optimizer"))["PYTORCH_CUDA_ALLOC_CONF"]
    assert setting == "expandable_segments:True,pinned_max_round_threshold_mb:1"
    with pytest.raises(Exception, match="stoull"):  # torch knows the name: it reads the number behind it
        torch._C._accelerator_setAllocatorSettings(setting.replace(":1", ":none"))


def test_processes_are_divided_among_the_machines() -> None:
    train = TrainConfig(num_processes=6, num_machines=3)
    arguments = torchrun(train, "10.0.0.1", 1234, number=2)
    assert " ".join(arguments) == (
        "--nnodes 3 --node-rank 2 --nproc-per-node 2 --master-addr 10.0.0.1 --master-port 1234"
    )


def test_every_launcher_of_the_configuration_is_in_the_table() -> None:
    schema = RunConfig.model_json_schema()["$defs"]["LaunchConfig"]["properties"]["launcher"]
    assert set(schema["enum"]) == set(LAUNCHERS)


# Each rank writes down its environment and prints; then rank 1 ends as it is told to, and rank 0 as if it had lost it.
RANK = """
import json, os, signal, sys, time
from pathlib import Path
folder, how, rank = Path(sys.argv[1]), int(sys.argv[2]), os.environ["RANK"]
names = [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_", "RANK", "WORLD_SIZE", "OMP_NUM"))]
(folder / f"{rank}.tmp").write_text(json.dumps({name: os.environ[name] for name in names}))
(folder / f"{rank}.tmp").rename(folder / rank)
for number in range(300):
    print("line", number)
os.system("echo from a child")
print("the last words", end="", file=sys.stderr)
while how and not (folder / str(1 - int(rank))).exists():
    time.sleep(0.01)
if how < 0 and rank == "1":
    os.kill(os.getpid(), -how)
if how and rank == "0":
    time.sleep(600)
sys.exit(how)
"""
HOSTILE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
num_processes: 32
mixed_precision: fp16
fsdp_config: {fsdp_version: 2, fsdp_offload_params: true}
"""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """What three processes have written down, and the lines that they have printed."""
    folder, lines = tmp_path_factory.mktemp("three"), list[str]()
    (folder / "accelerate").mkdir()
    (folder / "accelerate" / "default_config.yaml").write_text(HOSTILE)
    (folder / "rank.py").write_text(RANK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(folder))
        launch(_config(num_processes=3), [str(folder / "rank.py"), str(folder), "0"], lines.append, folder)
    return folder, lines


def test_several_processes_are_started_whatever_the_user_s_accelerate_configuration_says(
    three: tuple[Path, list[str]],
) -> None:
    for rank in "012":
        found = json.loads((three[0] / rank).read_text())
        assert (found["RANK"], found["WORLD_SIZE"], found["OMP_NUM_THREADS"]) == (rank, "3", "1")
        assert found["ACCELERATE_MIXED_PRECISION"] == "no"
        assert {name for name, value in found.items() if value.lower() == "true"} == {"ACCELERATE_USE_CPU"}
        assert not [name for name in found if "FSDP" in name]


def test_each_line_of_several_processes_is_whole_and_names_all_but_the_first(three: tuple[Path, list[str]]) -> None:
    expected = [*(f"line {number}" for number in range(300)), "from a child", "the last words"]
    for rank, name in enumerate(("", "rank 1: ", "rank 2: ")):
        own = [line for line in three[1] if line.startswith("rank") == bool(rank) and line.startswith(name)]
        assert own == [name + line for line in expected]


@pytest.mark.parametrize(
    ("how", "said", "restartable"),
    [(-9, "was killed by SIGKILL", True), pytest.param(3, "ended with status 3", False, marks=pytest.mark.e2e)],
)
def test_a_rank_that_fails_is_named_with_the_way_it_ended(
    tmp_path: Path, how: int, said: str, restartable: bool
) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    command = [str(tmp_path / "rank.py"), str(tmp_path), str(how)]
    with pytest.raises(ProcessError, match=rf"process 1 \(rank\) on \S+ {said}") as failed:
        launch(_config(num_processes=2), command, print, tmp_path)
    assert failed.value.restartable == restartable


def test_of_several_processes_the_one_that_failed_by_itself_is_named() -> None:
    assert find_cause({0: (LOST_PEER, 7), 1: (1, 7), 2: (-9, 7)}) == (2, 128 + 9)  # the others may fail in any way then
    assert find_cause({0: (LOST_PEER, 7), 1: (3, 7), 2: (-15, 7)}) == (1, 3)
    assert find_cause({0: (3, 7), 1: (-9, 37)}) == (0, 3)  # torchrun's SIGKILL
    assert find_cause({0: (143, 7), 1: (-15, 7)}) == (0, 143)
    assert find_cause({0: (LOST_PEER, 7), 1: (LOST_PEER, 8)}) == (0, LOST_PEER)


@pytest.mark.parametrize(
    ("one", "other", "restartable"),
    [
        (1, 128 + 9, True),  # the others may fail in any way then
        (LOST_PEER, LOST, True),
        (128 + 15, 128 + 9, True),
        (LOST_PEER, 1, False),
        (128 + 15, 1, False),
    ],
)
def test_of_two_failing_machines_the_one_that_failed_by_itself_is_named(
    one: int, other: int, restartable: bool
) -> None:
    commands = {
        name: ["-c", f"print('{name} fails'); raise SystemExit({code})"]
        for name, code in (("first", one), ("second", other))
    }
    lines: set[tuple[str, str]] = set()
    with pytest.raises(ProcessError, match=rf"machine second ended with status {other}(.|\n)*second fails") as failed:
        run_together(commands, lambda name, line: lines.add((name, line)))
    assert failed.value.restartable == restartable


@pytest.mark.parametrize(
    ("machines", "code", "restartable"),
    [("a", -1, False), ("ab", LOST_PEER, True)],
    ids=["a status that only looks like a signal", "machines that lost only each other"],
)
def test_machines_are_started_again_if_they_lost_each_other_alone(machines: str, code: int, restartable: bool) -> None:
    with pytest.raises(ProcessError) as failed:
        run_together({name: ["-c", f"raise SystemExit({code})"] for name in machines}, lambda name, line: None)
    assert failed.value.restartable == restartable


def test_the_other_machines_are_ended_when_one_is_killed() -> None:
    forever = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('told'))); signal.pause()"
    killed = "import os; os.kill(os.getpid(), 9)"
    lines: list[str] = []
    with pytest.raises(ProcessError, match="machine b"):
        run_together({"a": ["-c", forever], "b": ["-c", killed]}, lambda name, line: lines.append(f"{name} {line}"))
    assert set(lines) <= {"a told"}


# In place of the client: runs the command here, in a bash as sshd would, for hosts with a name that begins with "up".
FAKE = """#!/bin/bash
[ "$1" = -G ] && { echo "hostname 10.0.0.${3: -1}"; exit; }
host="${@: -2:1}"
[ "$host" = stuck ] && { kill -INT $PPID; sleep 20; touch "${0%/*}/waited"; }
[ "$host" = hung ] && exec sleep 60
[[ "$host" == *up* ]] || { echo "ssh: connect to host $host port 22: No route to host" >&2; exit 255; }
cd / && exec env -i bash -c "echo welcome; ${@: -1}"
"""


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An `ssh`, and a working directory and a PYTHONPATH that have to be quoted."""
    (tmp_path / "ssh").write_text(FAKE)
    (tmp_path / "ssh").chmod(0o755)
    folder = tmp_path / 'it\'s $HOME; "a place"'
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    path = f"{Path(machine.__file__).parents[2]}:{folder}"
    monkeypatch.setenv("PYTHONPATH", path)


def _ssh_config(*hosts: str, machines: int = 1) -> RunConfig:
    return _config({"launcher": "ssh", "hosts": list(hosts)}, num_processes=2 * machines, num_machines=machines)


@pytest.mark.usefixtures("client")
def test_the_first_hosts_that_answer_are_used(tmp_path: Path) -> None:
    with ssh(_ssh_config("root@up1", "down2", "ssh://up3:2222", "up4", machines=2), tmp_path, 0, print) as machines:
        found = [(each.name, each.address) for each in machines]
    assert found == [("up1", "10.0.0.1"), ("up3-2222", "10.0.0.2")]
    assert not [*tmp_path.glob(".host-check*")]


@pytest.mark.usefixtures("client")
def test_too_few_hosts_are_refused_with_what_ssh_says(tmp_path: Path) -> None:
    expected = r"1 of the 2 hosts .*train.num_machines=2 are needed. down2: ssh: connect .*No route to host"
    with pytest.raises(StageError, match=expected), ssh(_ssh_config("up1", "down2", machines=2), tmp_path, 0, print):
        pass


@pytest.mark.usefixtures("client")
def test_hosts_that_do_not_answer_are_not_waited_for_once_the_stage_is_told_to_end(tmp_path: Path) -> None:
    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores Ctrl-C
    try:
        with pytest.raises(KeyboardInterrupt), ssh(_ssh_config("stuck", "up1", machines=2), tmp_path, 0, print):
            pass
    finally:
        signal.signal(signal.SIGINT, former)
    assert not (tmp_path / "waited").exists()
    assert not [*tmp_path.glob(".host-check*")]


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"sees_run": False}, "up1 does not see .*storage root"),
        ({"version": "code 0, Python 2.7.18, torch 0.4"}, "up1 has code 0, Python 2.7.18, .*, but this machine code "),
        ({"problem": "no C compiler is found"}, "up1: no C compiler is found"),
    ],
)
def test_a_spare_host_takes_the_place_of_one_that_cannot_take_part_and_is_not_waited_for(
    answer: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ssh_launcher.why_unfit
    broken = {"up1": answer}
    monkeypatch.setattr(
        ssh_launcher, "why_unfit", lambda host, found, folder: own(host, found | broken.get(host, {}), folder)
    )
    said: list[str] = []
    with ssh(_ssh_config("up1", "up2", "hung"), tmp_path, 0, said.append) as machines:
        assert [machine.name for machine in machines] == ["up2"]
    assert len(said) == 1 and re.search(f"{message}.*Another host takes its place", said[0])
    config, expected = _ssh_config("up1", "up2", machines=2), f"1 of the 2 hosts .* {message}"
    with pytest.raises(StageError, match=expected), ssh(config, tmp_path, 0, said.append):
        pass


@pytest.mark.usefixtures("client")
def test_hosts_after_one_that_is_silent_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh_launcher, "CHECK_SECONDS", 0.0)
    monkeypatch.setattr(ssh_launcher, "READING_SECONDS", 10.0)  # for each of the two
    with ssh(_ssh_config("hung", "up1"), tmp_path, 0, print) as machines:
        assert [machine.name for machine in machines] == ["up1"]


@pytest.mark.parametrize(
    ("host", "name"), [("alpha", "alpha"), ("me@10.0.0.1", "10.0.0.1"), ("ssh://me@alpha:2222", "alpha-2222")]
)
def test_a_host_s_name_can_be_that_of_a_file(host: str, name: str) -> None:
    assert host_name(host) == name


def test_a_free_port_is_none_that_an_outgoing_connection_may_take_meanwhile() -> None:
    port = machine.free_port()
    assert port < 32768  # Linux's default
    with socket.socket() as held:
        held.bind(("", port))


def test_the_interface_to_this_machine_is_the_one_with_that_address() -> None:
    assert interface_to("127.0.0.1") == "lo"


def test_a_machine_gets_the_environment_except_what_is_a_machine_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_STORAGE", "/shared")
    for name in ("CUDA_VISIBLE_DEVICES", "SSH_AUTH_SOCK", "SLURM_NODEID", "HOME"):
        monkeypatch.setenv(name, "own")
    found = machine.shared_environment()
    assert found["GRPO_STORAGE"] == "/shared"
    assert not {"CUDA_VISIBLE_DEVICES", "SSH_AUTH_SOCK", "SLURM_NODEID", "HOME"} & found.keys()


# Stands for ssh: says what arrives, and ends as if the other side had (with the status), or the connection (255).
TRANSPORT = """
import json, sys
request = json.loads(sys.stdin.readline())
print(request["arguments"], request["environment"]["SECRET"], flush=True)
status = {status}
while status is None:
    if not sys.stdin.readline():
        print("input closed", flush=True)
        status = 143
sys.exit(status)
"""


def _relay(status: int | None) -> subprocess.Popen[str]:
    transport = json.dumps([sys.executable, "-c", TRANSPORT.format(status=status)])
    patched = "from tasks.processes import relay; relay.ENDING_SECONDS = 0.1; relay.main()"
    return subprocess.Popen(
        [sys.executable, "-c", patched, transport, "-m", "work"],
        env={**os.environ, "SECRET": "it's $HOME"},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("code", [0, 1, LOST_PEER, 137])
def test_a_relay_ends_as_the_other_side_does(code: int) -> None:
    relay = _relay(code)
    assert relay.communicate()[0] == "['-m', 'work'] it's $HOME\n"
    assert relay.returncode == code


def test_a_relay_that_is_told_to_stop_closes_the_input_and_waits_for_the_other_side() -> None:
    relay = _relay(None)
    assert relay.stdout is not None
    relay.stdout.readline()
    relay.send_signal(signal.SIGTERM)
    assert relay.communicate()[0] == "input closed\n"
    assert relay.returncode == 143


def test_a_relay_says_that_the_connection_is_lost_and_returns_when_nothing_can_be_left_there() -> None:
    relay = _relay(255)
    assert "the connection is lost; waiting" in relay.communicate()[0]
    assert relay.returncode == LOST


def test_the_small_processes_beside_a_training_start_without_the_configuration_s_schema() -> None:
    """Pydantic and the sections would take most of their start."""
    imports = "import sys; from tasks.processes import follow, machine, relay, restarting, scheduled"
    subprocess.run([sys.executable, "-c", f"{imports}; sys.exit('pydantic' in sys.modules)"], check=True)


@pytest.mark.needs("ssh")
def test_a_connection_is_its_own_whatever_the_user_s_ssh_configuration_says(tmp_path: Path) -> None:
    (tmp_path / "config").write_text("Host *\nControlMaster auto\nControlPath /tmp/%C\nRequestTTY force\n")
    client, *words = remote_command("alpha", "run")
    shown = subprocess.run([client, "-G", "-F", tmp_path / "config", *words], capture_output=True, text=True)
    assert "requesttty false" in shown.stdout and "controlpath" not in shown.stdout


@pytest.mark.usefixtures("client")
def test_a_remote_command_is_quoted(tmp_path: Path) -> None:
    [line] = remote_command("alpha", "run")[-1:]
    shown = subprocess.run(
        [
            "bash",
            "-c",
            line.replace(
                " -m tasks.processes.machine run",
                " -c 'import os; print(os.getcwd(), os.environ[\"PYTHONPATH\"], sep=chr(10))'",
            ),
        ],
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert shown.stdout.splitlines() == [str(Path.cwd()), os.environ["PYTHONPATH"]]
