"""Run the reward functions: each within its time, the asynchronous ones at once, a failure named exactly.

Asynchronous ones do not wait for the last completion: they are under way while the rest is still being sampled. An
isolated one runs in a process of its own, which is ended with all that it has started when the time is up.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from grpo_core.errors import RewardError
from grpo_core.rewards.contract import Reward
from grpo_core.rewards.isolated import ProcessDiedError

SHOWN = 200  # characters of a prompt or completion in a message
GRACE = 1.0  # seconds after which a coroutine that blocks or cleans up for long is ended like any function
TURNS = 20  # of an event loop: what has come in gets through a client and to its coroutine

Item = TypeVar("Item")


class _TimeIsUpError(BaseException):
    """Not an Exception: a function's own `except Exception` must not swallow it."""


FAILURES = (
    Exception,
    SystemExit,
    asyncio.CancelledError,
    _TimeIsUpError,
)  # what a reward is blamed for; not an interrupt


@dataclass(frozen=True)
class Batch:
    """B completions and what they belong to, row by row."""

    rows: Sequence[Mapping[str, Any]]  # dataset rows, "prompt" among their columns
    completions: Sequence[Any]  # texts, or conversations for conversational prompts
    completion_ids: Sequence[list[int]]

    def only(self, i: int) -> Batch:
        return Batch([self.rows[i]], [self.completions[i]], [self.completion_ids[i]])

    def read_by(self, reward: Reward) -> Batch:
        """What the reward, and a message about it, can say of the batch: all that has to be sent to its process."""
        if reward.accepts is None:
            return self
        columns = {"prompt", *reward.accepts}
        rows = [{key: value for key, value in row.items() if key in columns} for row in self.rows]
        ids = self.completion_ids if "completion_ids" in columns else [[] for _ in rows]
        return Batch(rows, self.completions, ids)

    def arguments(self, reward: Reward) -> dict[str, Any]:
        available = {
            **{key: [row[key] for row in self.rows] for key in self.rows[0] if key != "prompt"},
            "prompts": [row["prompt"] for row in self.rows],
            "completions": list(self.completions),
            "completion_ids": list(self.completion_ids),
            **reward.args,
        }
        accepts = reward.accepts
        return available if accepts is None else {k: v for k, v in available.items() if k in accepts}

    def shown(self, i: int) -> str:
        return f"prompt {short(self.rows[i]['prompt'])}, completion {short(self.completions[i])}"


def score(rewards: Sequence[Reward], batch: Batch) -> list[list[float]]:
    """For each reward the B values of the B completions, NaN for None; errors as in `score_arriving`."""
    _, _, columns = score_arriving(rewards, ([part] for part in (batch,)), lambda parts: parts[0])
    return columns


def score_arriving(
    rewards: Sequence[Reward],
    arriving: Generator[Sequence[Item], None, None],
    batch_of: Callable[[list[Item]], Batch],
) -> tuple[list[Item], Batch, list[list[float]]]:
    """Score what `arriving` gives: all items, as one batch, and for each reward its values.

    Functions that are `async def` are called with what has just arrived, and go on whenever `arriving` gives something,
    be it nothing. The others run one after the other when all is there, in this thread, with all of it; if one returns
    a coroutine, that runs to its end. Raises RewardError, with the function's name, a prompt and the completion, when a
    function raises, returns something else than a finite number in its range or None for each completion, or does not
    come back within its timeout; nothing more is then asked of `arriving`.
    """
    asynchronous = [reward for reward in rewards if reward.is_async]
    items: list[Item] = []
    parts: list[tuple[Batch, dict[str, Any]]] = []  # with the values that asynchronous functions gave
    with closing(_Loop()) as loop:
        with closing(arriving):
            for new in arriving:
                if new:
                    items += new
                    parts.append((batch_of(list(new)), {}))
                    for reward in asynchronous:
                        loop.start(reward, *parts[-1])
                loop.turn()
        whole = _joined([batch for batch, _ in parts])
        values = {reward.name: _run(reward, whole) for reward in rewards if parts and not reward.is_async}
        loop.finish()
    columns = {name: checked(reward, values[name], whole) for reward in rewards if (name := reward.name) in values}
    for reward in asynchronous:
        columns[reward.name] = [value for part, found in parts for value in checked(reward, found[reward.name], part)]
    return items, whole, [columns.get(reward.name, []) for reward in rewards]


class _Loop:
    """The asynchronous functions' calls, on an event loop that runs only when it is told to: what runs in between may
    have loops of its own. The time that it stands still is nobody's."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.calls: dict[asyncio.Task[None], tuple[Reward, Batch]] = {}
        self.scopes: set[asyncio.Timeout] = set()
        self.failed: list[tuple[Reward, Batch, BaseException]] = []  # in the order in which they did
        self.deadline = self.stopped = time.monotonic()

    def start(self, reward: Reward, batch: Batch, values: dict[str, Any]) -> None:
        async def call() -> None:
            try:
                values[reward.name] = await _awaited(reward, batch, reward.timeout, self.scopes)
            except FAILURES as error:
                self.failed.append((reward, batch, error))

        _make_ready(reward)
        task = self.runner.get_loop().create_task(call())
        task.add_done_callback(self.calls.pop)
        self.calls[task] = reward, batch
        self.deadline = max(self.deadline, time.monotonic() + reward.timeout + GRACE)

    def turn(self) -> None:
        """Go on as far as the calls get without waiting."""

        async def turns() -> None:
            for _ in range(TURNS):
                await asyncio.sleep(0)

        if self.calls:
            self._run(turns())

    def finish(self) -> None:
        while self.calls:
            self._run(asyncio.wait([*self.calls], return_when=asyncio.FIRST_COMPLETED))

    def close(self) -> None:
        """Cancel the calls that are left; who clings is left behind."""
        with suppress(_TimeIsUpError), _time_limit(GRACE):
            self.runner.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> None:
        """Let the loop run until the work is done; RewardError when a call has failed."""
        stood = time.monotonic() - self.stopped
        self.deadline += stood

        async def go_on() -> None:
            for scope in self.scopes:
                if not scope.expired():
                    scope.reschedule((scope.when() or 0.0) + stood)
            await work

        try:
            with _time_limit(max(self.deadline - time.monotonic(), 1e-3)):
                self.runner.get_loop().run_until_complete(go_on())
        except _TimeIsUpError as time_is_up:  # who is ended by force, and clings to its time even so, has noted nothing
            self.failed += [(*call, time_is_up) for call in self.calls.values()]
        self.stopped = time.monotonic()
        if self.failed:
            reward, batch, error = self.failed[0]
            if isinstance(error, ProcessDiedError):  # any of the calls that it had to answer may have ended it
                calls = [(other, part) for other, part, _ in self.failed] + [*self.calls.values()]
                batch = _joined([*{id(part): part for other, part in calls if other is reward}.values()])
            raise _explained(reward, batch, error) from error


def _run(reward: Reward, batch: Batch) -> Any:
    try:
        return _call(reward, batch, reward.timeout)
    except FAILURES as error:
        raise _explained(reward, batch, error) from error


def _call(reward: Reward, batch: Batch, seconds: float) -> Any:
    """The function's answer; _TimeIsUpError when there is none after `seconds`."""
    _make_ready(reward)
    if reward.process or reward.is_async:
        with _time_limit(seconds + GRACE):
            return asyncio.run(_awaited(reward, batch, seconds, set()))
    with _time_limit(seconds):
        return plain_answer(reward, batch)


def _make_ready(reward: Reward) -> None:
    """Start the process of an isolated reward if it does not run: what it imports does not count as the call's time."""
    if reward.process:
        reward.process.start()


def plain_answer(reward: Reward, batch: Batch) -> Any:
    """What a function that is not `async def` gives in this process, be it in a coroutine."""
    answer = reward.function(**batch.arguments(reward))
    return asyncio.run(_result_of(answer)) if inspect.isawaitable(answer) else answer


async def _result_of(answer: Awaitable[Any]) -> Any:
    return await answer


async def _awaited(reward: Reward, batch: Batch, seconds: float, scopes: set[asyncio.Timeout]) -> Any:
    """The coroutine's answer; its time limit is among `scopes` while it runs."""
    if reward.process:
        answer: Any = reward.process.call(batch.read_by(reward))
    else:
        answer = reward.function(**batch.arguments(reward))
    try:
        async with asyncio.timeout(seconds) as scope:
            scopes.add(scope)
            return await answer
    except (TimeoutError, asyncio.CancelledError):
        if scope.expired():
            raise _TimeIsUpError from None
        raise
    finally:
        scopes.discard(scope)


def _joined(batches: Sequence[Batch]) -> Batch:
    return Batch(*([entry for batch in batches for entry in getattr(batch, f.name)] for f in fields(Batch)))


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise _TimeIsUpError in the block after `seconds`: also in a wait, and in a regular expression that runs wild.
    What swallows it gets it again, every GRACE seconds.

    A function that uses SIGALRM itself (math_verify does) takes the timer over while it runs, and has limits of its
    own. Signals reach the main thread only: in another one there is no limit.
    """

    def time_is_up(*_: Any) -> None:
        raise _TimeIsUpError

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGALRM, time_is_up)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, GRACE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _explained(reward: Reward, batch: Batch, error: BaseException) -> RewardError:
    """What failed, with the completion that makes it fail by itself where there is one.

    A RewardError says itself what is wrong, and no completion is to blame.
    """
    if isinstance(error, RewardError):
        return RewardError(f"reward {reward.name!r}: {error}")
    timed_out = isinstance(error, _TimeIsUpError)
    share = reward.timeout / len(batch.rows) if timed_out else reward.timeout
    culprit = _culprit(reward, batch, type(error), share)
    if timed_out:
        what, advice = f"did not come back within {reward.timeout:g} s", "; raise its timeout, or make it faster"
    elif isinstance(error, ProcessDiedError):
        what, advice = f"lost its process, which {error},", f"; {error.advice}"
    else:
        what, advice = f"raised {type(error).__name__}: {text_of(error)}", ""
        if reward.process and type(error).__name__ == "MemoryError":
            advice = f"; its process may take memory_gib = {reward.process.config.memory_gib:g}"
    if culprit is None:
        where = f"for {len(batch.rows)} completions together, not for one alone; the first: {batch.shown(0)}"
    else:
        where = f"for {batch.shown(culprit)}" + (f", which alone takes more than {share:.2g} s" if timed_out else "")
    return RewardError(f"reward {reward.name!r} {what} {where}{advice}")


def text_of(error: BaseException) -> str:
    """What the exception says, also if it cannot say it."""
    try:
        return str(error)
    except FAILURES as unsaid:
        return f"(its text cannot be shown: its __str__ raises {type(unsaid).__name__})"


def _culprit(reward: Reward, batch: Batch, kind: type[BaseException], share: float) -> int | None:
    """The first completion that fails in this way when it is alone; looked for no longer than the timeout."""
    with suppress(RewardError):
        _make_ready(reward)
    deadline = time.monotonic() + reward.timeout
    for i in range(len(batch.rows)):
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        try:
            _call(reward, batch.only(i), min(share, left))
        except kind:
            return i
        except FAILURES:
            continue
    return None


def checked(reward: Reward, values: Any, batch: Batch) -> list[float]:
    """The values as numbers, NaN for None; RewardError when they break the contract."""
    if isinstance(values, RewardError):  # found by the same check in the reward's process
        raise values
    if getattr(values, "ndim", None) == 1:  # a tensor, or an array
        values = values.tolist()
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    if not is_list or len(values) != len(batch.rows):
        got = f"{len(values)} values" if is_list else type(values).__name__
        raise RewardError(
            f"reward {reward.name!r} returned {got} for {len(batch.rows)} completions; one each is needed. "
            f"The first: {batch.shown(0)}"
        )
    for i, value in enumerate(values):
        if value is not None and not _is_finite_number(value):
            raise RewardError(
                f"reward {reward.name!r} returned {value!r} for {batch.shown(i)}; "
                "return a finite number, or None where it does not apply"
            )
        if value is not None and reward.range and not reward.range[0] <= value <= reward.range[1]:
            raise RewardError(
                f"reward {reward.name!r} returned {value!r} for {batch.shown(i)}; its range is "
                f"{reward.range[0]:g} to {reward.range[1]:g}: correct the function or the range"
            )
    return [math.nan if value is None else float(value) for value in values]


def _is_finite_number(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


def short(value: Any) -> str:
    """A value as Python writes it, with its middle left out if it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}"
