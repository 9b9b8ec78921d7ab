"""Runs inside the sandbox: an interpreter that keeps its variables from one piece of code to the next, as a notebook
does. The source of this module is given to `python -c`.

Nothing here is trusted: the code may change all of it. Frames (a length in four bytes, then that many bytes) come from
standard input, and answers go where standard output was.
"""

import ast
import builtins
import linecache
import marshal
import os
import resource
import signal
import sys
import time
import traceback

FRAMES = 4  # of a traceback, the last ones
LONGEST_ERROR = 2000  # characters


def main():
    requests, answers = os.dup(0), os.dup(1)
    limits = marshal.loads(receive(requests))
    for name, value in limits["kernel"]:
        kind = getattr(resource, name)
        allowed = resource.getrlimit(kind)[1]
        value = value if allowed == resource.RLIM_INFINITY else min(value, allowed)
        resource.setrlimit(kind, (value, value))
    redirect(0)
    output = redirect(1, os.O_APPEND)
    os.dup2(1, 2)
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # as the module `site` does
    signal.signal(signal.SIGXCPU, lambda *_: raise_timeout(limits["cpu_seconds"]))
    module = sys.modules["__main__"] = type(sys)("__main__")
    me = os.getpid()
    send(answers, b"started")
    number = 0
    while (code := receive(requests)) is not None:
        number += 1
        problem = ""
        # New streams, since the last call may have replaced, closed or overfilled those.
        sys.stdout, sys.stderr = (open(file, "w", encoding="utf-8", closefd=False) for file in (1, 2))  # noqa: SIM115
        streams = sys.stdout, sys.stderr
        os.ftruncate(output, 0)
        total = resource.getrlimit(resource.RLIMIT_CPU)[1]
        try:
            spent = int(time.process_time()) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (min(spent + limits["cpu_seconds"], total), total))
            run(code.decode("utf-8", "surrogatepass"), f"<call {number}>", module.__dict__)
        except BaseException as error:
            problem = shown(error)
        if os.getpid() != me:  # the code has forked, and the fork has returned from it too
            os._exit(0)
        for stream in streams:
            try:
                stream.flush()
            except OSError as full:
                problem += f"OSError: {full}: what was printed is lost; remove files from /tmp\n"
                try:
                    stream.close()  # else Python 3.13 says in a later call's output that closing it failed
                except OSError:
                    continue
            except Exception:  # it is closed
                continue
        text = shortened(output, limits["characters"]) + problem[-LONGEST_ERROR:]
        send(answers, text.encode("utf-8", "replace"))


def run(code, name, names):
    """Run the code, and print the value of its last expression, as a notebook does."""
    lines = [line + "\n" for line in code.splitlines()]
    linecache.cache[name] = (len(code), None, lines, name)  # for tracebacks
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), name, "eval"), names)
        if value is not None:
            names["_"] = value
            print(repr(value))


def shown(error):
    """The error as a short traceback, without the frames of this module."""
    here = error.__traceback__
    while here is not None and not here.tb_frame.f_code.co_filename.startswith("<call "):
        here = here.tb_next
    try:
        found = traceback.TracebackException(type(error), error, here, limit=-FRAMES)
        found.stack = traceback.StackSummary.from_list([it for it in found.stack if it.filename != "<string>"])
        lines = found.format(chain=False) if here else found.format_exception_only()
        return "".join(lines)
    except BaseException as other:  # its __str__ raises, or memory is short
        return f"{type(error).__name__} ({type(other).__name__} while showing it)\n"


def shortened(output, max_characters):
    """The text that was printed, or its beginning and end if it has more than `max_characters`."""
    size = os.fstat(output).st_size
    room, half = 4 * max_characters, max_characters // 2
    if size <= room:
        text = os.pread(output, room, 0).decode("utf-8", "replace")
        if len(text) <= max_characters:
            return text
        head, tail, left_out = text[:half], text[-half:], f"{len(text) - half * 2:,} characters"
    else:
        head = os.pread(output, room // 2, 0).decode("utf-8", "replace")[:half]
        tail = os.pread(output, room // 2, size - room // 2).decode("utf-8", "replace")[-half:]
        left_out = f"about {size - max_characters:,} bytes"
    return f"{head}\n[… {left_out} of output are left out here …]\n{tail}"


def raise_timeout(seconds):
    raise TimeoutError(f"the {seconds} seconds of processor time that a call has are up")


def redirect(stream, flags=0):
    """Replace the stream by an empty file that no other process can open. Returns a descriptor of the file."""
    file = os.open("stream", os.O_RDWR | os.O_CREAT | os.O_TRUNC | flags, 0o600)
    os.unlink("stream")  # noqa: PTH108 (pathlib takes long to import)
    os.dup2(file, stream)
    return file


def send(file, body):
    frame = len(body).to_bytes(4, "big") + body
    while frame:
        frame = frame[os.write(file, frame) :]


def receive(file):
    head = exactly(file, 4)
    return None if head is None else exactly(file, int.from_bytes(head, "big"))


def exactly(file, count):
    parts = b""
    while len(parts) < count:
        part = os.read(file, count - len(parts))
        if not part:
            return None
        parts += part
    return parts


if __name__ == "__main__":
    main()
