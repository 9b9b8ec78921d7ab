"""Hosts that are network namespaces of this machine: each with its own address and a real sshd, joined by a bridge."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.needs import PATH, needs

NUMBER = os.getpid() % 200  # so that two test sessions on this machine do not meet
NETWORK = f"10.77.{NUMBER}"
BRIDGE = f"grpo{NUMBER}"
PORT = 2222
SSHD = """
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/client_key.pub
PasswordAuthentication no
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
"""
SSH = """
Host *
  Port {port}
  User root
  IdentityFile {folder}/client_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking yes
"""


@dataclass(frozen=True)
class Host:
    """A host by the alias that the test's ssh configuration has for it."""

    name: str
    namespace: str
    address: str

    @property
    def link(self) -> str:
        """This machine's end of the cable to it; such names have 15 characters at most."""
        return f"{BRIDGE}-{self.name[0]}"

    def processes(self) -> list[psutil.Process]:
        """All that run there, sshd included."""
        found = []
        for pid in _ip("netns", "pids", self.namespace).split():
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    def named(self, *words: str) -> list[psutil.Process]:
        """Those with all the words in their command lines."""
        found = []
        for process in self.processes():
            with suppress(psutil.Error):
                if all(word in " ".join(process.cmdline()) for word in words):
                    found.append(process)
        return found

    def left(self) -> list[psutil.Process]:
        """What runs there except sshd, whose sessions may wait for a cut connection."""
        found = []
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                if process.name() != "sshd" and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def unplug(self) -> None:
        _ip("link", "set", self.link, "down")

    def plug_in(self) -> None:
        _ip("link", "set", self.link, "up")

    def lose(self, other: Host) -> None:
        """Send all packets for another host to an address on the bridge that nothing has: neither end is told."""
        _ip("-n", self.namespace, "neighbour", "replace", other.address, "lladdr", "02:00:00:00:00:01", "dev", "cable")

    def find(self, other: Host) -> None:
        _ip("-n", self.namespace, "neighbour", "flush", "to", other.address, "nud", "permanent")

    def freeze(self) -> None:
        for _ in range(3):  # what one of them has started meanwhile, too
            for process in self.processes():
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)

    def restore(self) -> None:
        """As it was before a test."""
        self.thaw()
        self.plug_in()
        for process in self.left():
            with suppress(psutil.NoSuchProcess):
                process.kill()


@contextmanager
def some_hosts(folder: Path, *names: str) -> Iterator[tuple[list[Host], dict[str, str]]]:
    """Hosts, and the environment in which `ssh` reaches them by these names, which begin with different letters. Skips
    where they cannot be made."""
    needs("ip", "ssh", "sshd")
    sshd = str(shutil.which("sshd", path=PATH))
    if os.geteuid():
        pytest.skip("hosts as network namespaces need root")
    hosts = [Host(name, f"{BRIDGE}-{name}", f"{NETWORK}.{n}") for n, name in enumerate(names, 1)]
    with ExitStack() as stack:
        _make_network(hosts, stack)
        for name in ("host_key", "client_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        key = (folder / "host_key.pub").read_text()
        (folder / "known_hosts").write_text("".join(f"[{host.address}]:{PORT} {key}" for host in hosts))
        aliases = "".join(f"Host {host.name}\n  HostName {host.address}\n" for host in hosts)
        (folder / "ssh_config").write_text(aliases + SSH.format(port=PORT, folder=folder))
        Path("/run/sshd").mkdir(exist_ok=True)
        for host in hosts:
            config = folder / f"{host.name}.sshd"
            config.write_text(SSHD.format(port=PORT, address=host.address, folder=folder))
            command = ["ip", "netns", "exec", host.namespace, sshd, "-D", "-f", config, "-E", f"{config}.log"]
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(_end, host, process)
        wrapper = folder / "bin" / "ssh"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
        wrapper.chmod(0o755)
        environment = {**os.environ, "PATH": f"{wrapper.parent}:{os.environ['PATH']}"}
        for host in hosts:
            for _ in range(100):
                if not subprocess.run([wrapper, host.name, "true"], capture_output=True).returncode:
                    break
                time.sleep(0.1)
            else:
                raise AssertionError((folder / f"{host.name}.sshd.log").read_text())
        yield hosts, environment


def _make_network(hosts: list[Host], stack: ExitStack) -> None:
    _remove(hosts)  # what a killed test has left
    stack.callback(_remove, hosts)
    try:
        _ip("link", "add", BRIDGE, "type", "bridge")
    except AssertionError as error:
        pytest.skip(f"this machine makes no network bridge: {error}")
    _ip("address", "add", f"{NETWORK}.254/24", "dev", BRIDGE)
    _ip("link", "set", BRIDGE, "up")
    for host in hosts:
        _ip("netns", "add", host.namespace)
        _ip("link", "add", host.link, "type", "veth", "peer", "name", "cable", "netns", host.namespace)
        _ip("link", "set", host.link, "master", BRIDGE, "up")
        for words in (
            ("address", "add", f"{host.address}/24", "dev", "cable"),
            ("link", "set", "cable", "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", host.namespace, *words)


def _remove(hosts: list[Host]) -> None:
    links = [("link", "delete", host.link) for host in hosts]  # else each stays while anything holds its namespace
    for words in (*links, *(("netns", "delete", host.namespace) for host in hosts), ("link", "delete", BRIDGE)):
        with suppress(AssertionError):
            _ip(*words)


def _end(host: Host, sshd: subprocess.Popen[bytes]) -> None:
    """Kill everything that a failed test has left on the host."""
    for process in host.processes():
        with suppress(psutil.NoSuchProcess):
            process.kill()
    sshd.kill()


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


if __name__ == "__main__":  # for hands: python -m tests.e2e.hosts FOLDER COMMAND…
    Path(sys.argv[1]).mkdir()
    with some_hosts(Path(sys.argv[1]).absolute(), "alpha", "beta") as (_, environment):
        sys.exit(subprocess.run(sys.argv[2:], env=environment).returncode)
