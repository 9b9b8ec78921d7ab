"""The processes of environments: `python -m grpo_core.environments.worker DESCRIPTOR`.

One process imports the configured classes and tools. For each environment that is asked for, it forks one, which has
them imported already, holds one instance and answers one request after the other. A guard (`system.guard`) ends all of
them with the process that asks. Requests and answers are frames of JSON: no object of theirs is rebuilt outside.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import random
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

from grpo_core.system.guard import guarded

LONGEST_ANSWER = 1 << 16  # characters of a tool's answer: far more than fits into any context
NO_TEXT = "which is no text"  # at the end of what is said of such an answer
OPEN_FILES = 1024
OWN = ("reset", "get_reward")  # methods of an environment that are no tools
PLAIN = (str, int, float, bool, list, dict, type(None))


class UnusableError(Exception):
    """An environment or tool that cannot be used; the message says why."""


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    guarded(control)
    first = _accept(control)
    if first is None:
        return
    with first:
        setup = receive(first)
        sys.path[:] = setup["path"]
        try:
            tools = {name: found(source) for name, source in setup["tools"].items()}
            factories = {name: found(source) for name, source in setup["factories"].items()}
            send(first, describe(tools, factories, setup["args"]))
        except UnusableError as error:
            send(first, {"refused": str(error)})
            return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that ended children leave nothing to be waited for
    while connection := _accept(control):
        if os.fork():
            connection.close()
            continue
        control.close()
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _limit(setup["memory_gib"])
        serve(connection, tools, factories, setup["args"])
        os._exit(0)


def serve(
    connection: socket.socket,
    tools: Mapping[str, Callable[..., Any]],
    factories: Mapping[str, Callable[..., Any]],
    args: Mapping[str, Mapping[str, Any]],
) -> None:
    """Answer the requests of one conversation after the other until the connection is closed."""
    send(connection, {"pid": os.getpid()})
    instances: dict[str, Any] = {}
    environment: Any = None
    with asyncio.Runner() as runner:

        def settled(value: Any) -> Any:
            async def awaited() -> Any:
                return await value

            return runner.run(awaited()) if inspect.isawaitable(value) else value

        while (request := receive(connection)) is not None:
            try:
                match request["do"]:
                    case "reset":
                        _seed(request["seed"])
                        name = request["environment"]
                        if name in factories and name not in instances:
                            instances[name] = factories[name](**args.get(name, {}))
                        environment = instances.get(name)
                        value = None if environment is None else settled(environment.reset(**request["row"]))
                        if not (value is None or isinstance(value, str)):
                            raise TypeError(f"reset returned {type(value).__name__}; return text or None")
                    case "call":
                        tool = tools.get(request["name"]) or getattr(environment, request["name"])
                        value = text_of(settled(tool(**request["arguments"])))
                    case "get":
                        value = getattr(environment, request["name"])
                        if callable(value):
                            send(connection, {"callable": True})
                            continue
                        value = _plain(value, request["name"])
                    case "invoke":
                        method = getattr(environment, request["name"])
                        value = _plain(settled(method(*request["args"], **request["kwargs"])), request["name"])
                answer = {"value": value}
            except AttributeError as error:
                answer = {"missing" if request["do"] == "get" else "raised": [type(error).__name__, _message(error)]}
            except BaseException as error:  # exit() and interrupts of the user's code too
                answer = {"raised": [type(error).__name__, _message(error)]}
            _flush()
            send(connection, answer)


def text_of(value: Any) -> str:
    """A tool's answer as text. Raises TypeError or ValueError for what is none."""
    if type(value) not in PLAIN:
        raise TypeError(f"the tool returned {type(value).__name__}, {NO_TEXT}")
    text = value if isinstance(value, str) else str(value)
    if len(text) > LONGEST_ANSWER:
        raise ValueError(f"the tool returned {len(text):,} characters; {LONGEST_ANSWER:,} are the most")
    text.encode()  # no lone surrogates
    return text


def describe(
    tools: Mapping[str, Callable[..., Any]],
    factories: Mapping[str, Callable[..., Any]],
    args: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Schemas of the tools, and of each environment's. Raises UnusableError."""
    common = {name: schema(function, name) for name, function in tools.items()}
    environments = {}
    for name, factory in factories.items():
        shown = name or getattr(factory, "__name__", str(factory))
        try:
            instance = factory(**args.get(name, {}))
        except Exception as error:
            raise UnusableError(f"the environment {shown} cannot be made: {type(error).__name__}: {error}") from error
        methods = [method for method, _ in inspect.getmembers(type(instance), inspect.isfunction)]
        if "reset" not in methods:
            raise UnusableError(f"the environment {shown} has no method reset(**row); it begins each conversation")
        own = {it: schema(getattr(instance, it), it) for it in methods if it not in OWN and not it.startswith("_")}
        if twice := own.keys() & common.keys():
            raise UnusableError(f"the environment {shown} has a method {min(twice)!r}, and so is a tool called")
        environments[name] = {"tools": {**common, **own}, "has_reward": "get_reward" in methods}
    return {"tools": common, "environments": environments, "files": _files(tools, factories)}


def schema(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """JSON schema of a tool, from its types and its docstring in Google style."""
    from transformers.utils import get_json_schema

    try:
        found = get_json_schema(function)
    except Exception as error:  # DocstringParsingException, TypeHintParsingException, or what an annotation raises
        raise UnusableError(
            f"the tool {name!r} cannot be described to the policy: {error} (types for all arguments, and a docstring "
            "that describes the tool and, under `Args:`, each of them)"
        ) from error
    found["function"].pop("return", None)
    return found


def found(source: str) -> Any:
    """What `module:name` names. Raises UnusableError."""
    module, _, name = source.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError as error:
        raise UnusableError(f"{source!r} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:  # a user's module may do anything
        raise UnusableError(f"{source!r} cannot be imported: {type(error).__name__}: {error}") from error


def _files(*named: Mapping[str, Any]) -> list[str]:
    modules = {getattr(inspect.getmodule(each), "__file__", None) for group in named for each in group.values()}
    return sorted(filter(None, modules))


def _plain(value: Any, name: str) -> Any:
    """A value as the asking process can have it."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of numpy or torch
        value = value.item()
    try:
        json.dumps(value, allow_nan=True)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is {type(value).__name__}, which JSON cannot hold ({error})") from None
    return value


def _seed(seed: int) -> None:
    """Random numbers of the environment follow from the row: all completions of a prompt start from the same state."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def _limit(memory_gib: float) -> None:
    limits = {
        resource.RLIMIT_DATA: int(memory_gib * 2**30),
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        allowed = resource.getrlimit(kind)[1]
        value = value if allowed == resource.RLIM_INFINITY else min(value, allowed)
        resource.setrlimit(kind, (value, value))


def _message(error: BaseException) -> str:
    try:
        return str(error)[:LONGEST_ANSWER]
    except Exception as unsaid:
        return f"(its text cannot be shown: its __str__ raises {type(unsaid).__name__})"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # the user's code may have closed it
            continue


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """One frame: the length of what follows in four bytes, then JSON."""
    body = json.dumps(message).encode()
    connection.sendall(struct.pack(">I", len(body)) + body)


def receive(connection: socket.socket) -> Any:
    """The next frame's message; None at the connection's end."""
    head = _exactly(connection, 4)
    body = _exactly(connection, struct.unpack(">I", head)[0]) if head else None
    return None if body is None else json.loads(body)


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = b""
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            return None
        parts += part
    return parts


def _accept(control: socket.socket) -> socket.socket | None:
    something, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    return socket.socket(fileno=descriptors[0]) if something and descriptors else None


if __name__ == "__main__":
    main()
