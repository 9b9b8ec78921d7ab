"""The processes of environments: `python -m grpo_core.environments.worker DESCRIPTOR`.

One process, the starter, imports the configured classes and tools. For each environment that is asked for, it forks a
process, which has them imported already, holds one instance and answers one request after the other. Between the two is
a keeper, which ends what the environment leaves running. A guard (`system.guard`) ends all with the process that asks.

Requests are pickled: a row arrives as it is. Answers are JSON: no object of the user's code is rebuilt outside.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import pickle
import random
import re
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from grpo_core.system.descendants import adopt_orphans, kill_descendants
from grpo_core.system.guard import die_with_parent, flush_output, guarded, limit_resources
from grpo_core.system.sandbox.verifier import NoVerdictError

LONGEST_ANSWER = 1 << 16  # characters of a tool's answer: far more than fits into any context
MAX_BYTES = 1 << 26  # of an attribute that a reward reads
NO_TEXT = "which is no text"  # ends the error about an answer that is not text
OWN = ("reset", "get_reward")  # methods of an environment that are not tools
ADDRESS = re.compile(r" at 0x[0-9a-f]+>")  # in the text of an object that defines none


class UnusableError(Exception):
    """An environment or tool that cannot be used; the message says why."""


class Imported(NamedTuple):
    """The tools and classes that the configuration names, and the arguments of the classes, by name."""

    tools: Mapping[str, Callable[..., Any]]
    factories: Mapping[str, Callable[..., Any]]
    args: Mapping[str, Mapping[str, Any]]

    def make(self, name: str) -> Any:
        """Make an instance of a class."""
        return self.factories[name](**self.args.get(name, {}))


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    guarded(control)
    first = _accept(control)
    if first is None:
        return
    setup = pickle.loads(receive(first) or b"")
    sys.path[:] = setup["path"]
    try:
        tools, factories = ({name: found(it) for name, it in setup[kind].items()} for kind in ("tools", "factories"))
    except UnusableError as error:
        _send_json(first, {"refused": str(error)})
        return
    code = Imported(tools, factories, setup["args"])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that ended children leave nothing to be waited for

    def start(connection: socket.socket, work: Callable[[], None]) -> None:
        if os.fork() == 0:
            control.close()
            _run_under_keeper(connection, work, setup["memory_gib"])
        connection.close()

    # Instances are made for the description in a process of its own: their threads, say, would break each later fork.
    start(first, lambda: _send_json(first, describe(code) if setup["describes"] else {}))
    while connection := _accept(control):
        start(connection, partial(serve, connection, code))


def _run_under_keeper(connection: socket.socket, work: Callable[[], None], memory_gib: float) -> None:
    """Do the work in a child of this process, which was just forked; end what the child leaves running, then end."""
    try:
        die_with_parent()
        adopt_orphans()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        child = os.fork()
        if child == 0:
            _run_and_end(work, memory_gib)
        connection.close()
        while os.wait()[0] != child:  # others are what the child has left behind, and has ended
            continue
        kill_descendants()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
    finally:
        os._exit(0)


def _run_and_end(work: Callable[[], None], memory_gib: float) -> None:
    """Do the work in this process, which was just forked, and end it."""
    try:
        die_with_parent()
        os.setsid()
        limit_resources(memory_gib)
        with suppress(OSError):  # if memory runs out, this process is ended, not the training
            Path("/proc/self/oom_score_adj").write_text("1000")
        work()
    except OSError:  # the connection is gone
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def serve(connection: socket.socket, code: Imported) -> None:
    """Answer the requests of one conversation after the other until the connection is closed."""
    me = os.getpid()
    _send_json(connection, {"pid": me})
    with asyncio.Runner() as runner:
        instances = _Instances(code, runner)
        while (body := runner.run(_next(connection))) is not None:
            request = pickle.loads(body)
            if request["do"] == "rest":  # nothing waits for an answer: an error ends this process
                _reset_tools(code.tools)
                continue
            answer = instances.answer(request)
            if os.getpid() != me:  # the user's code has forked, and the fork has returned from it too
                os._exit(0)
            flush_output()
            _send_json(connection, {"to": request["number"], **answer})


async def _next(connection: socket.socket) -> bytes | None:
    """Return the next request. Until it arrives, the loop runs: connections that the environment keeps and tasks that
    it has started live on. While it answers by a plain method the loop rests, so that the method may use its own."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, arrived.set)
    try:
        await arrived.wait()
    finally:
        loop.remove_reader(connection)
    return receive(connection)


class _Instances:
    """The tools and this process's environments, each made when a conversation first needs it."""

    def __init__(self, code: Imported, runner: asyncio.Runner):
        self.code, self.runner = code, runner
        self.made: dict[str, Any] = {}
        self.current: Any = None  # the conversation's environment

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The value that the request asks for, or the error that it causes."""
        try:
            value = self._value(request)
        except NoVerdictError as error:
            return {"value": 0.0, "verifier_error": _message(error)}
        except AttributeError as error:
            return {"missing" if request["do"] == "get" else "raised": [type(error).__name__, _message(error)]}
        except BaseException as error:  # exit() and interrupts of the user's code too
            return {"raised": [type(error).__name__, _message(error)]}
        return {"callable": True} if value is ... else {"value": value}

    def _value(self, request: Mapping[str, Any]) -> Any:
        match request["do"]:
            case "reset":
                return self._reset(request["environment"], request["seed"], request["row"])
            case "call":
                tool = self.code.tools.get(request["name"]) or getattr(self.current, request["name"])
                return text_of(self._settled(tool(**request["arguments"])))
            case "get":
                value = getattr(self.current, request["name"])
                return ... if callable(value) else _plain(value, request["name"])
            case "invoke":
                method = getattr(self.current, request["name"])
                return _plain(self._settled(method(*request["args"], **request["kwargs"])), request["name"])

    def _reset(self, name: str, seed: int, row: Mapping[str, Any]) -> str | None:
        """Begin a conversation. Returns what the environment adds to the prompt."""
        _reset_tools(self.code.tools)
        _seed(seed)
        if name in self.code.factories and name not in self.made:
            self.made[name] = self.code.make(name)
        self.current = self.made.get(name)
        added = None if self.current is None else self._settled(self.current.reset(**row))
        if not (added is None or isinstance(added, str)):
            raise TypeError(f"reset returned {type(added).__name__}; return text or None")
        return added and text_of(added)

    def _settled(self, value: Any) -> Any:
        async def awaited() -> Any:
            return await value

        return self.runner.run(awaited()) if inspect.isawaitable(value) else value


def _reset_tools(tools: Mapping[str, Callable[..., Any]]) -> None:
    """Reset every tool that keeps something between calls: a method of an object that has `reset`."""
    for tool in tools.values():
        if reset := getattr(getattr(tool, "__self__", None), "reset", None):
            reset()


def text_of(value: Any) -> str:
    """Return what a tool or `reset` returned, as text. Raises TypeError or ValueError if the value is not text."""
    text = value if isinstance(value, str) else str(value)
    if not isinstance(value, str) and ADDRESS.search(text):
        raise TypeError(f"the tool returned {type(value).__name__}, {NO_TEXT}")
    if len(text) > LONGEST_ANSWER:
        raise ValueError(f"{len(text):,} characters were returned; {LONGEST_ANSWER:,} are the most")
    text.encode()  # no lone surrogates
    return text


def describe(code: Imported) -> dict[str, Any]:
    """Schemas of the tools, and of each environment's; or the reason why one cannot be used."""
    try:
        return _described(code)
    except UnusableError as error:
        return {"refused": str(error)}


def _described(code: Imported) -> dict[str, Any]:
    common = {name: schema(function, name) for name, function in code.tools.items()}
    environments = {}
    for name, factory in code.factories.items():
        shown = name or getattr(factory, "__name__", str(factory))
        try:
            instance = code.make(name)
        except (Exception, SystemExit) as error:
            raise UnusableError(f"the environment {shown} cannot be made: {type(error).__name__}: {error}") from error
        methods = [method for method, _ in inspect.getmembers(type(instance), inspect.isfunction)]
        if "reset" not in methods:
            raise UnusableError(f"the environment {shown} has no method reset(**row); it begins each conversation")
        own = {it: schema(getattr(instance, it), it) for it in methods if it not in OWN and not it.startswith("_")}
        if twice := own.keys() & common.keys():
            raise UnusableError(f"the environment {shown} has a method {min(twice)!r}, which is a tool's name too")
        environments[name] = {"tools": {**common, **own}, "has_reward": "get_reward" in methods}
    return {"tools": common, "environments": environments}


def schema(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """JSON schema of a tool, from its types and its docstring in Google style."""
    from transformers.utils import chat_template_utils

    # Else it imports torch, for seconds, to know arguments that are tensors, which no policy can write.
    chat_template_utils.is_torch_available = lambda: False
    try:
        found = chat_template_utils.get_json_schema(function)
    except Exception as error:  # DocstringParsingException, TypeHintParsingException, or what an annotation raises
        raise UnusableError(
            f"the tool {name!r} cannot be described to the policy: {error} (types for all arguments, and a docstring "
            "that describes the tool and, under `Args:`, each of them)"
        ) from error
    for each in inspect.signature(function).parameters.values():
        if each.kind in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL, each.VAR_KEYWORD):
            raise UnusableError(f"the tool {name!r} takes '{each}', and the policy gives each argument by its own name")
    found["function"].pop("return", None)
    return found


def found(source: str) -> Any:
    """Import what `module:name` names. Raises UnusableError if that fails."""
    module, _, name = source.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError as error:
        raise UnusableError(f"{source!r} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:  # a user's module may do anything
        raise UnusableError(f"{source!r} cannot be imported: {type(error).__name__}: {error}") from error


def _plain(value: Any, name: str) -> Any:
    """Return a value in a form that can be sent to the asking process."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy or torch
        value = value.item()
    try:
        size = len(json.dumps(value, allow_nan=True))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"{name} is {type(value).__name__}, which JSON cannot hold ({error}); it comes from the environment's "
            "process: let it be numbers, text, lists or dictionaries"
        ) from None
    if size > MAX_BYTES:
        raise ValueError(f"{name} takes {size:,} bytes; {MAX_BYTES:,} are the most")
    return value


def _seed(seed: int) -> None:
    """Seed the environment's random numbers by the row: all completions of a prompt start from the same state."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def _message(error: BaseException) -> str:
    try:
        return str(error)[:LONGEST_ANSWER].encode(errors="backslashreplace").decode()
    except Exception as unsaid:
        return f"(its text cannot be shown: its __str__ raises {type(unsaid).__name__})"


def _send_json(connection: socket.socket, message: Mapping[str, Any]) -> None:
    send(connection, json.dumps(message).encode())


def send(connection: socket.socket, body: bytes) -> None:
    """Send one frame: the length of the body in four bytes, then the body."""
    connection.sendall(struct.pack(">I", len(body)) + body)


def receive(connection: socket.socket) -> bytes | None:
    """Return the body of the next frame; None at the connection's end."""
    head = _receive_exactly(connection, 4)
    return _receive_exactly(connection, struct.unpack(">I", head)[0]) if head else None


def _receive_exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def _accept(control: socket.socket) -> socket.socket | None:
    something, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=descriptors[0]) if something and descriptors else None


if __name__ == "__main__":
    main()
