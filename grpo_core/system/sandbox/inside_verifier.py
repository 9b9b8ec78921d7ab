"""Runs inside the sandbox: a verifier, imported once, and a process of its own for each judgement. The source of this
module is given to `python -c`.

Nothing that a judgement's process sends is trusted: an answer may have taken it over. It can start no process, write no
file and not end this one, which is process 1 of the namespace.
"""

import json
import os
import pickle
import resource
import select
import signal
import socket
import sys
import time

TICK = 0.05  # seconds between looks at the clock while something is judged


def main():
    setup = json.loads(sys.argv[1])
    sys.path += setup["packages"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control, names = socket.socket(fileno=0), {}
    exec(compile(setup["source"], "verifier.py", "exec"), names)
    control.send(b".")
    running = {}  # process → when its time is up
    while True:
        free = len(running) < setup["together"]
        if select.select([control] if free else [], [], [], TICK if running else None)[0]:
            something, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not something:
                return
            with socket.socket(fileno=descriptors[0]) as connection:
                child = os.fork()
                if child == 0:
                    judge(control, connection, names["judge"], setup["limits"])
                running[child] = time.monotonic() + setup["wall_seconds"]
        while running and (child := os.waitpid(-1, os.WNOHANG)[0]):
            del running[child]
        for child, end in running.items():
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)


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
