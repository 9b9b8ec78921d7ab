"""`python -m tasks.processes.ranks ARGUMENTS`: torchrun, as the stages use it: one machine's processes of a training.

Arguments are torchrun's. The exit status says what ended it: 0 success; 128 + n a process killed by signal n; LOST_PEER
processes that only lost others; otherwise the status of the process that failed first.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress

import psutil

from grpo_core.errors import LOST_PEER
from tasks.processes.run import SIGNALLED, blame

TOGETHER_SECONDS = 10.0  # failures within them may have the same cause; torchrun's SIGKILL comes later


def main() -> None:
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    arguments = parse_args(sys.argv[1:])
    processes, machines = int(arguments.nproc_per_node), int(arguments.nnodes)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    if not torch.cuda.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"  # lets Accelerate take several processes without a GPU (gloo)
    if machines > 1 and (found := interface_to(arguments.master_addr)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", found)  # gloo takes the host name's address: often 127.0.1.1
    try:
        run(arguments)
    except ChildFailedError as error:
        rank, code = cause({rank: (it.exitcode, it.timestamp) for rank, it in error.failures.items()})
        print(f"process {rank} (rank) on {socket.gethostname()} {describe(code)}", flush=True)
        sys.exit(code)
    except SignalException as told:
        sys.exit(SIGNALLED + told.sigval)
    except torch.distributed.DistError as error:  # the machines do not find each other
        print(error, flush=True)
        sys.exit(LOST_PEER)


def cause(failures: Mapping[int, tuple[int, float]]) -> tuple[int, int]:
    """The process that failed by itself, and its exit status. `failures`: rank → exit code (-n: signal n), time in s.

    Once a process has failed, torchrun ends the others by SIGTERM and, 30 s later, SIGKILL, and reports that too.
    """
    first = min(time for _, time in failures.values())
    found = {
        rank: code if code >= 0 else SIGNALLED - code
        for rank, (code, time) in failures.items()
        if time < first + TOGETHER_SECONDS
    }
    return min(found.items(), key=lambda item: blame(item[1]))


def describe(code: int) -> str:
    """How a process ended that has this exit status, as the end of a sentence."""
    if code == LOST_PEER:
        return "lost another process, or the network to it"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(code - SIGNALLED).name}"
    return f"ended with status {code}"


def interface_to(address: str) -> str | None:
    """The network interface with this machine's address on the way to another machine; None if there is no way."""
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
