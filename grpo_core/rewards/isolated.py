"""A reward function in its own process (`isolated = true`), seen from the training.

The function may end its process, leak memory or descriptors, change environment or folder, or ignore its time limit,
without harm to the training. Requests are pickled, answers are read as JSON: no object that the function makes is
rebuilt here. The other end is `isolated_worker`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import operator
import pickle
import random
import signal
import socket
import subprocess
import sys
import types
import typing
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_core.config.inputs import RewardConfig
from grpo_core.errors import RewardError
from grpo_core.rewards.trl_arguments import CallLog
from grpo_core.system.guard import END_SECONDS, end_guarded, start_guarded

START_SECONDS = 300.0  # for a process to start and import the function's module

KINDS = {kind.__name__: kind for kind in (str, bool, int, float, list, dict, types.NoneType)}  # of a column's values
_descriptions: dict[tuple[str, frozenset[str]], dict[str, Any]] = {}  # by function and the arguments it is given


class ProcessDiedError(Exception):
    """The process ended before it had answered; the message says how, `advice` what to do."""

    def __init__(self, how: str, advice: str):
        super().__init__(how)
        self.advice = advice


class RewardProcess:
    """The process of one reward: started when it is first needed, kept, and started again if it has died.

    It ends with this object, and with the process that holds this object, however that process ends.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.under_way = 0  # calls
        self._running: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._end: Callable[[], object] = lambda: None

    @property
    def description(self) -> dict[str, Any]:
        """The answer of `isolated_worker.describe`, asked once per function and names of arguments."""
        key = self.config.function, frozenset(self.config.args)
        if key not in _descriptions:
            self.start()
        return _descriptions[key]

    def start(self) -> None:
        """Start the process unless it is running. Raises RewardError if the function cannot be imported or used."""
        if self._running:
            if self._running[0].poll() is None:
                return
            died = self._died(self._running[0])
            print(
                f"reward {self.config.name!r}: its process {died} between two calls, and is started again", flush=True
            )
        self.end()
        guard, control = self._running = start_guarded("grpo_core.rewards.isolated_worker")
        self._end = weakref.finalize(self, end_guarded, guard, control)
        path = [str(Path(entry).absolute()) for entry in sys.path]
        answer = asyncio.run(self._describe((self.config, path)))
        if "refused" in answer:
            self.end()
            raise RewardError(answer["refused"])
        _descriptions[self.config.function, frozenset(self.config.args)] = answer

    def end(self) -> None:
        """End the process, if it is running, and everything that it has started."""
        self._running = None
        self._end()

    async def call(self, batch: Any, log: CallLog) -> Any:
        """Return the function's values for the batch, or the RewardError that says what is wrong with them. `log` gets
        what it has logged.

        Raises what the function raises, as an exception of the same name and text, and ProcessDiedError. Cancelling a
        call ends the process.
        """
        state = None if self.under_way else draws_state()
        self.under_way += 1
        try:
            answer = await self._ask((batch, state))
        finally:
            self.under_way -= 1
        if not self.under_way:
            set_draws_state(answer["draws"])
        if "raised" in answer:
            name, text = answer["raised"]
            raise _error_named(name)(text)
        if "refused" in answer:
            raise RewardError(answer["refused"])
        log.columns, log.figures = answer["logged"]
        return RewardError(answer["broken"]) if "broken" in answer else answer["values"]

    async def _describe(self, request: Any) -> Any:
        try:
            async with asyncio.timeout(START_SECONDS):
                return await self._ask(request)
        except ProcessDiedError as error:
            raise RewardError(
                f"reward {self.config.name!r} ({self.config.function}) cannot be imported: its process {error} while "
                f"importing it; {error.advice}"
            ) from None
        except TimeoutError:
            raise RewardError(
                f"reward {self.config.name!r} ({self.config.function}) cannot be imported: its process had not done so "
                f"after {START_SECONDS:g} s; let its module do less when it is imported"
            ) from None

    async def _ask(self, request: Any) -> Any:
        """Return the answer to one request, sent over a connection of its own."""
        assert self._running
        guard, control = self._running
        mine, theirs = socket.socketpair()
        try:
            try:
                with theirs:
                    socket.send_fds(control, [b"."], [theirs.fileno()])
                reader, writer = await asyncio.open_connection(sock=mine)
                try:
                    writer.write(pickle.dumps(request))
                    writer.write_eof()
                    return json.loads(await reader.read())
                finally:
                    writer.transport.abort()
            except (OSError, ValueError):  # the connection broke, or ended before the answer did
                raise self._died(guard) from None
        except BaseException:
            self.end()
            raise
        finally:
            mine.close()

    def _died(self, guard: subprocess.Popen[bytes]) -> ProcessDiedError:
        try:
            code = guard.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return ProcessDiedError("closed its connection", "let the function close only what it has opened")
        if code >= 0:
            return ProcessDiedError(
                f"ended with exit status {code}", "let the function return or raise, and not end its process"
            )
        return ProcessDiedError(
            f"was ended by {signal.Signals(-code).name}",
            f"look for a fault in compiled code, or for memory running out: its own limit is memory_gib = "
            f"{self.config.memory_gib:g}, and the machine ends a process that is too large by SIGKILL",
        )


def kind_names(kind: Any) -> list[str]:
    """Names of the types that a column's values may have; "Any" for an annotation that does not say."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    kinds = typing.get_args(kind) if is_union else (kind,)
    plain = [typing.get_origin(each) or each for each in kinds]
    return [each.__name__ if each in KINDS.values() else "Any" for each in plain]


def kind_of(names: Sequence[str]) -> Any:
    """The type that `kind_names` named."""
    return functools.reduce(operator.or_, [KINDS.get(name, Any) for name in names])


@functools.cache
def _error_named(name: str) -> type[Exception]:
    """An exception class of this name, the same class for the same name, so that failures can be compared."""
    return type(name, (Exception,), {})


def draws_state() -> dict[str, Any]:
    """State of the random generators of Python and, if loaded, NumPy and torch (on the CPU), as values for JSON: handed
    on between the training and a reward's process, so that either draws the same, also after a resume."""
    state: dict[str, Any] = {"python": random.getstate()}
    if numpy := sys.modules.get("numpy"):
        kind, key, *rest = numpy.random.get_state()
        state["numpy"] = [kind, key.tobytes().hex(), *rest]
    if torch := sys.modules.get("torch"):
        state["torch"] = torch.get_rng_state().numpy().tobytes().hex()
    return state


def set_draws_state(state: Mapping[str, Any]) -> set[str]:
    """Restore what `draws_state` returned. Returns the names of the generators that were set: torch's is left out
    if torch is not loaded, since importing it takes seconds."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "numpy" in state:
        import numpy

        kind, key, *rest = state["numpy"]
        numpy.random.set_state((kind, numpy.frombuffer(bytes.fromhex(key), dtype=numpy.uint32), *rest))
    if "torch" in state and (torch := sys.modules.get("torch")):
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
        return {*state}
    return {*state} - {"torch"}
