"""A Slurm cluster on this machine: its real daemons, with two nodes, which share an address and have a port each."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tasks.processes.machine import free_port
from tests.needs import needs
from tests.processes import wait_for, with_variables

NODES = ("alpha", "beta")
NODE_SECONDS = 20  # after which a node whose daemon is gone counts as failed
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode={preempt}
ReturnToService=2
SlurmdTimeout={seconds}
KillWait=30
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=30
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""


class Cluster:
    """The daemons, and the environment in which Slurm's commands reach them."""

    def __init__(self, folder: Path, stack: ExitStack):
        self.folder, self.stack = folder, stack
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str | Path) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def start_node(self, name: str) -> None:
        self.start(name, "slurmd", "-D", "-N", name)

    def __call__(self, *command: str, script: str = "") -> str:
        done = subprocess.run(command, env=self.environment, input=script, capture_output=True, text=True)
        assert not done.returncode, done.stderr
        return done.stdout.strip()

    def jobs(self) -> list[str]:
        """Identifiers of the jobs that wait or run."""
        return self("squeue", "--noheader", "--format=%i").split()

    def occupy(self, seconds: int, partition: str = "high") -> str:
        """Submit a job that takes all nodes for so long."""
        script = f"#!/bin/sh\nexec srun sleep {seconds}\n"
        options = ("--parsable", "--nodes=2", f"--partition={partition}", "--output=/dev/null")
        return self("sbatch", *options, script=script)

    def until_idle(self) -> None:
        idle = ("sinfo", "--noheader", "--format=%T", "--partition=low")
        wait_for(lambda: self(*idle) == "idle", 120, lambda: self("sinfo"))

    def running_on(self, node: str) -> list[psutil.Process]:
        """What Slurm's tasks on the node have started."""
        return with_variables(SLURMD_NODENAME=node, SLURM_CONF=self.environment["SLURM_CONF"])

    def kill_node(self, node: str) -> None:
        """End everything on a node, as a failing power supply does."""
        processes = [it for it in self.running_on(node) if it.name() != "srun"]
        for process in (*(it.parent() for it in processes), *processes):
            with suppress(psutil.NoSuchProcess):
                if process and (process in processes or process.name().startswith("slurmstepd")):
                    process.kill()
        self.daemons[node].kill()
        self.daemons[node].wait()


@contextmanager
def slurm_cluster(folder: Path, preempt: str = "CANCEL") -> Iterator[Cluster]:
    """A cluster with two nodes of one CPU each, idle. Skips where there is no Slurm to run."""
    needs("munged", "slurmctld", "slurmd", "sbatch")
    if os.geteuid():
        pytest.skip("a Slurm cluster needs root")
    with ExitStack() as stack:
        cluster = Cluster(folder, stack)
        stack.callback(_end, cluster)
        (folder / "state").mkdir()
        host = socket.gethostname()
        conf = CONF.format(host=host, port=free_port(), folder=folder, preempt=preempt, seconds=NODE_SECONDS)
        for node in NODES:
            conf += f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1\n"
        (folder / "slurm.conf").write_text(conf)
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed")]
        cluster.start("munged", "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
        wait_for((folder / "munge.socket").exists, 30, (folder / "munged.log").read_text)
        cluster.start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            cluster.start_node(node)
        asked = {"env": cluster.environment, "capture_output": True}
        log = folder / "slurmctld.log"
        wait_for(lambda: not subprocess.run(["sinfo"], **asked).returncode, 30, log.read_text)
        cluster.until_idle()
        yield cluster


def _end(cluster: Cluster) -> None:
    """End the daemons, and what a failed test has left."""
    for node in NODES:
        for process in cluster.running_on(node):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    for daemon in cluster.daemons.values():
        daemon.terminate()
    for daemon in cluster.daemons.values():
        with suppress(subprocess.TimeoutExpired):
            daemon.wait(20)
        daemon.kill()
        daemon.wait()
