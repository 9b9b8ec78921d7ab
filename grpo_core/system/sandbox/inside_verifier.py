"""Runs inside the sandbox: a verifier, imported once, and a process of its own for each judgement. The source of this
module is given to `python -c`.

Nothing that a judgement's process sends is trusted: an answer may have taken it over. It can start no process, write no
file and not end this one, which is process 1 of the namespace.
"""

import json
import mmap
import os
import pickle
import resource
import select
import signal
import socket
import sys
import time


def main():
    setup = json.loads(sys.argv[1])
    sys.path += setup["packages"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control, names = socket.socket(fileno=0), {}
    exec(compile(setup["source"], "verifier.py", "exec"), names)
    limits = [*setup["limits"], ("RLIMIT_AS", address_space() + setup["memory"])]
    control.send(b".")
    running = {}  # descriptor of a judgement's process → the process, and when its time is up
    while True:
        free = len(running) < setup["together"]
        wait = max(0.0, min(end for _, end in running.values()) - time.monotonic()) if running else None
        ready = select.select([*running, *([control] if free else [])], [], [], wait)[0]
        for ended in [each for each in running if each in ready]:
            os.waitpid(running.pop(ended)[0], 0)
            os.close(ended)
        for process, end in running.values():
            if time.monotonic() > end:
                os.kill(process, signal.SIGKILL)
        if control in ready:
            something, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not something:
                return
            with socket.socket(fileno=descriptors[0]) as connection:
                process = os.fork()
                if process == 0:
                    judge(control, connection, names["judge"], limits)
                running[os.pidfd_open(process)] = process, time.monotonic() + setup["wall_seconds"]


def address_space():
    """Bytes of address space that this process has: the lowest limit under which it gets a page more, since the sandbox
    has no /proc."""
    page, low, high = resource.getpagesize(), 0, 1 << 47
    while high - low > page:
        middle = (low + high) // 2
        resource.setrlimit(resource.RLIMIT_AS, (middle, resource.RLIM_INFINITY))
        try:
            mmap.mmap(-1, page).close()
            high = middle
        except OSError:
            low = middle
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return high


def judge(control, connection, function, limits):
    """Answer one request, and end this process."""
    try:
        control.close()
        silence = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silence, stream)
        request = pickle.loads(read(connection))
        for name, value in limits:
            resource.setrlimit(getattr(resource, name), (value, value))
        try:
            verdict = f"score {float(function(**request))}"
        except BaseException as error:
            verdict = f"raised {type(error).__name__}: {error}"[:500]
        connection.sendall(verdict.encode(errors="replace"))
    finally:
        os._exit(0)


def read(connection):
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


if __name__ == "__main__":
    main()
