"""Runs inside the sandbox: a program, and the questions to it. The source of this module is given to `python -c`.

Nothing here is trusted: the program may change all of it. The right answers are not known here, and the output is read
as data. It imports next to nothing, since starting is most of the cost of a small program.
"""

import builtins
import marshal
import posix
import resource
import sys
import time
from _json import encode_basestring_ascii

FLOATS = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}  # as readers of JSON know them
SIGKILL = 9
REAPED_WITHIN = 2.0  # seconds; without a sandbox, process 1 may be one that never reaps zombies


def main():
    job = marshal.loads(read(0))
    answers = posix.dup(1)
    for stream in (0, 1, 2):
        redirect(stream, b"")
    say(answers, "started", "")
    for name, value in job["limits"]:
        kind = getattr(resource, name)
        allowed = resource.getrlimit(kind)[1]
        value = value if allowed == resource.RLIM_INFINITY else min(value, allowed)
        resource.setrlimit(kind, (value, value))
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # as the module `site` does
    code = compile(job["program"], "program.py", "exec")
    if job["calls"]:
        names = run(code, "program")
    for number, call in job["calls"]:
        in_child(value_of, call, names, answers, number)
    for number, text in job["inputs"]:
        in_child(printed, code, text, answers, number)


def value_of(call, names, answers, number):
    say(answers, number, encoded(eval(call, names)))


def printed(code, text, answers, number):
    redirect(0, text)
    redirect(1, b"")
    run(code, "__main__")
    sys.stdout.flush()
    posix.lseek(1, 0, 0)
    say(answers, number, encode_basestring_ascii(read(1).decode("utf-8", "replace")))


def run(code, name):
    """Run the program as the module `name` and return its variables. Exiting with an error status is an error."""
    module = sys.modules[name] = type(sys)(name)
    try:
        exec(code, module.__dict__)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise
    return module.__dict__


def in_child(work, *arguments):
    """Do the work in its own process, so that it cannot affect the next; what it leaves running is ended."""
    child = posix.fork()
    if child == 0:
        try:
            posix.setpgid(0, 0)
            work(*arguments)
        finally:
            posix._exit(0)
    posix.waitpid(child, 0)
    try:
        until = time.monotonic() + REAPED_WITHIN
        while time.monotonic() < until:  # a killed process counts against the limit until process 1 has reaped it
            posix.killpg(child, SIGKILL)
            time.sleep(0.0002)
    except OSError:  # there is nothing left
        pass


def encoded(value):
    """JSON in which everything except null, booleans, numbers and text is a list that starts with its kind."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        text = float.__repr__(value)
        return FLOATS.get(text, text)
    if isinstance(value, str):
        return encode_basestring_ascii(str.__str__(value))
    if isinstance(value, dict):
        return items("dict", map(encoded, value.items()))
    for kind in (list, tuple, set):
        if isinstance(value, kind):
            return items(kind.__name__, map(encoded, value))
    if isinstance(value, frozenset):
        return items("set", map(encoded, value))
    return items("iterator", map(encoded, value))


def items(kind, texts):
    return "[" + ", ".join([f'"{kind}"', *texts]) + "]"


def say(answers, number, text):
    line = f"{number} {text}\n".encode()
    while line:
        line = line[posix.write(answers, line) :]


def redirect(stream, content):
    """Replace the stream by a file that no other process can open."""
    file = posix.open("stream", posix.O_RDWR | posix.O_CREAT | posix.O_TRUNC, 0o600)
    posix.unlink("stream")
    posix.write(file, content)
    posix.lseek(file, 0, 0)
    posix.dup2(file, stream)
    posix.close(file)


def read(stream):
    parts = []
    while part := posix.read(stream, 1 << 16):
        parts.append(part)
    return b"".join(parts)


if __name__ == "__main__":
    main()
