"""`python -m tasks.processes.ranks ARGUMENTS`: run one machine's processes of a training by torchrun.

Arguments are torchrun's. Exit status 0: success. 128 + n: a process was killed by signal n. LOST_PEER: processes only
lost contact to others. Otherwise: the status of the process that failed first.

The processes' output goes through this one, line by line, so that lines do not interleave. Lines of all processes
except the very first begin with "rank N: ".
"""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import psutil

from grpo_core.errors import LOST_PEER
from tasks.processes.run import SIGNALLED, cause_rank

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

END = b"\0end of output\n"  # torchrun itself holds the pipes open, so they never reach their end
TOLD_BY = (signal.SIGTERM, signal.SIGINT)
TOGETHER_SECONDS = 10.0  # failures this close may have the same cause; torchrun's SIGKILL comes later


def main() -> None:
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    arguments = parse_args(sys.argv[1:])
    processes, machines = int(arguments.nproc_per_node), int(arguments.nnodes)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    if not torch.cuda.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"  # lets Accelerate use several processes without a GPU (gloo)
    if machines > 1 and (found := interface_to(arguments.master_addr)):
        # By default, gloo takes the host name's address, which is often 127.0.1.1.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", found)
    config, command, words = config_from_args(arguments)
    first = int(arguments.node_rank) * processes
    config.signals_to_handle = "SIGHUP,SIGQUIT"  # the others are handled here
    try:
        tell_once(SignalException)
        with named_output(range(first, first + processes)) as config.logs_specs:
            elastic_launch(config, command)(*words)
    except ChildFailedError as error:
        rank, code = find_cause({rank: (it.exitcode, it.timestamp) for rank, it in error.failures.items()})
        print(f"process {rank} (rank) on {socket.gethostname()} {describe(code)}", flush=True)
        sys.exit(code)
    except SignalException as told:
        sys.exit(SIGNALLED + told.sigval)
    except torch.distributed.DistError as error:  # the machines do not find each other
        print(error, flush=True)
        sys.exit(LOST_PEER)


def tell_once(told: Callable[[str, signal.Signals], Exception]) -> None:
    """Let the first SIGTERM or SIGINT raise `told`, and ignore all others: Slurm, its srun and the supervisor each send
    one. A second one would interrupt torchrun as it waits for its processes, which then lose their output while they
    save."""

    def end(number: int, frame: object) -> None:
        for each in TOLD_BY:
            signal.signal(each, signal.SIG_IGN)
        raise told(f"told to end by signal {number}", signal.Signals(number))

    for each in TOLD_BY:
        signal.signal(each, end)


@contextmanager
def named_output(ranks: range) -> Iterator[LogsSpecs]:
    """Give torchrun one pipe per process for its output, and print what arrives there, line by line."""
    from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

    pipes = [os.pipe() for _ in ranks]
    readers = [
        threading.Thread(target=_print_lines, args=(inward, rank), daemon=True)
        for (inward, _), rank in zip(pipes, ranks, strict=True)
    ]

    class Pipes(LogsSpecs):
        root_log_dir = os.devnull

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            places = {number: f"/dev/fd/{outward}" for number, (_, outward) in enumerate(pipes)}
            return LogsDest(stdouts=places, stderrs=places, error_files=dict.fromkeys(places, os.devnull))

    for reader in readers:
        reader.start()
    try:
        yield Pipes()
    finally:
        for _, outward in pipes:
            os.write(outward, END)
        for reader in readers:
            reader.join()


def _print_lines(pipe: int, rank: int) -> None:
    name = f"rank {rank}: ".encode() if rank else b""
    with open(pipe, "rb") as lines:
        for line in lines:
            text, end, _ = line.partition(END)
            if text:
                sys.stdout.buffer.write(name + text.rstrip(b"\n") + b"\n")
                sys.stdout.buffer.flush()
            if end:
                return


def find_cause(failures: Mapping[int, tuple[int, float]]) -> tuple[int, int]:
    """Return the rank and exit status of the process that failed by itself. `failures`: rank → exit code (-n: signal
    n), time in s.

    Once a process has failed, torchrun ends the others by SIGTERM and, 30 s later, SIGKILL, and reports that too.
    """
    first = min(time for _, time in failures.values())
    found = {
        rank: code if code >= 0 else SIGNALLED - code
        for rank, (code, time) in failures.items()
        if time < first + TOGETHER_SECONDS
    }
    return min(found.items(), key=lambda item: cause_rank(item[1]))


def describe(code: int) -> str:
    """Describe how a process with this exit status ended, as the end of a sentence."""
    if code == LOST_PEER:
        return "lost another process, or the network to it"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(code - SIGNALLED).name}"
    return f"ended with status {code}"


def interface_to(address: str) -> str | None:
    """Network interface with this machine's address on the way to another machine; None if there is no way."""
    own = own_address(address)
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            with suppress(ValueError):
                if ipaddress.ip_address(each.address) == own:
                    return name
    return None


def own_address(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """This machine's address on the way to another machine; None if there is no way."""
    with suppress(OSError):
        family, kind, protocol, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as way:
            way.connect(place)  # sends nothing
            return ipaddress.ip_address(way.getsockname()[0])
    return None


if __name__ == "__main__":
    main()
