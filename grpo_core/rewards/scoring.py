"""Run the reward functions: each within its time, the asynchronous ones at once, a failure named exactly.

They need not wait for the last completion: what there is so far is scored while the rest is still being sampled.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from grpo_core.rewards.contract import Reward, RewardError

SHOWN = 200  # characters of a prompt or completion in a message
GRACE = 1.0  # seconds after which a coroutine that blocks or cleans up for long is ended like any function

END = object()  # after the last that arrives

Item = TypeVar("Item")
Result = TypeVar("Result")


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
        return f"prompt {_short(self.rows[i]['prompt'])}, completion {_short(self.completions[i])}"


def score(rewards: Sequence[Reward], batch: Batch) -> list[list[float]]:
    """For each reward the B values of the B completions, NaN for None; errors as in `score_arriving`."""
    ((_, _, columns),) = score_arriving(rewards, ([b] for b in (batch,)), lambda batches: batches[0])
    return columns


def score_arriving(
    rewards: Sequence[Reward],
    arriving: Generator[Sequence[Item], None, None],
    batch_of: Callable[[list[Item]], Batch],
) -> list[tuple[list[Item], Batch, list[list[float]]]]:
    """Score what `arriving` gives as soon as it is there; a thread of its own waits for it.

    A batch is all that arrived since functions were last called. They run one after the other in this thread; those
    that are `async def` all at once, of all batches. Returns each batch with its items and, for each reward, values.
    RewardError, with the function's name, a prompt and the completion, when one raises, returns something else than a
    finite number in its range or None for each completion, or does not come back within its timeout; nothing more is
    then asked of `arriving`.
    """
    scored: list[tuple[list[Item], Batch, dict[str, Any]]] = []
    enough = threading.Event()
    with closing(_Loop()) as loop, ThreadPoolExecutor(1, "arriving") as thread:

        def read() -> None:
            try:
                with closing(arriving):
                    for items in arriving:
                        if enough.is_set():
                            break
                        if items:
                            loop.put(items)
            finally:
                loop.put(END)

        reading = thread.submit(read)
        try:
            while loop.arriving or loop.calls:
                items = loop.wait()
                if not items:
                    continue
                batch = batch_of(items)
                values: dict[str, Any] = {}
                scored.append((items, batch, values))
                for reward in filter(_is_async, rewards):
                    loop.start(reward, batch, values)
                loop.tick()  # what they ask for is under way while functions run
                values |= {reward.name: _run(reward, batch) for reward in rewards if not _is_async(reward)}
            reading.result()
        finally:
            enough.set()
    return [
        (items, batch, [_checked(reward, values[reward.name], batch) for reward in rewards])
        for items, batch, values in scored
    ]


class _Loop:
    """The asynchronous functions' calls, and what arrives for them, on an event loop that runs only while it is waited
    for: functions that run meanwhile may have loops of their own. The time that it stands still is nobody's."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.loop = self.runner.get_loop()
        self.news: asyncio.Queue[Any] = asyncio.Queue()
        self.arriving = True
        self.calls: dict[asyncio.Task[None], tuple[Reward, Batch]] = {}
        self.scopes: set[asyncio.Timeout] = set()
        self.failed: list[tuple[Reward, Batch, BaseException]] = []  # in the order in which they did
        self.deadline = self.stopped = time.monotonic()

    def put(self, items: Any) -> None:
        """From another thread: what has arrived, END after the last."""
        self.loop.call_soon_threadsafe(self.news.put_nowait, items)

    def start(self, reward: Reward, batch: Batch, values: dict[str, Any]) -> None:
        async def call() -> None:
            try:
                values[reward.name] = await _awaited(reward, batch, reward.timeout, self.scopes)
            except FAILURES as error:
                self.failed.append((reward, batch, error))

        def ended(task: asyncio.Task[None]) -> None:
            del self.calls[task]
            self.news.put_nowait([])

        task = self.loop.create_task(call())
        task.add_done_callback(ended)
        self.calls[task] = reward, batch
        self.deadline = max(self.deadline, time.monotonic() + reward.timeout + GRACE)

    def tick(self) -> None:
        if self.calls:
            self._run(asyncio.sleep(0))

    def wait(self) -> list[Any]:
        """What has arrived; nothing when a call has ended, or when nothing more will arrive."""

        async def news() -> list[Any]:
            items, found = [], await self.news.get()
            while found is not END:
                items += found
                if self.news.empty():
                    return items
                found = self.news.get_nowait()
            self.arriving = False
            return items

        return self._run(news())

    def close(self) -> None:
        """Cancel the calls that are left; who clings is left behind."""
        with suppress(_TimeIsUpError), _time_limit(GRACE):
            self.runner.close()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Let the loop run until the work is done; RewardError when a call has failed."""
        stood = time.monotonic() - self.stopped
        self.deadline += stood

        async def go_on() -> Result:
            for scope in self.scopes:
                if not scope.expired():
                    scope.reschedule((scope.when() or 0.0) + stood)
            return await work

        try:
            with _time_limit(max(self.deadline - time.monotonic(), 1e-3)) if self.calls else nullcontext():
                result = self.loop.run_until_complete(go_on())
        except _TimeIsUpError as time_is_up:  # who is ended by force, and clings to its time even so, has noted nothing
            self.failed += [(*call, time_is_up) for call in self.calls.values()]
        self.stopped = time.monotonic()
        if self.failed:
            reward, batch, error = self.failed[0]
            raise _explained(reward, batch, error) from error
        return result


def _run(reward: Reward, batch: Batch) -> Any:
    try:
        return _call(reward, batch, reward.timeout)
    except FAILURES as error:
        raise _explained(reward, batch, error) from error


def _call(reward: Reward, batch: Batch, seconds: float) -> Any:
    """The function's answer; _TimeIsUpError when there is none after `seconds`."""
    if _is_async(reward):
        with _time_limit(seconds + GRACE):
            return asyncio.run(_awaited(reward, batch, seconds, set()))
    with _time_limit(seconds):
        return reward.function(**batch.arguments(reward))


async def _awaited(reward: Reward, batch: Batch, seconds: float, scopes: set[asyncio.Timeout]) -> Any:
    """The coroutine's answer; its time limit is among `scopes` while it runs."""
    answer: Any = reward.function(**batch.arguments(reward))
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
    """What failed, with the completion that makes it fail by itself where there is one."""
    timed_out = isinstance(error, _TimeIsUpError)
    share = reward.timeout / len(batch.rows) if timed_out else reward.timeout
    culprit = _culprit(reward, batch, type(error), share)
    what = f"did not come back within {reward.timeout:g} s" if timed_out else f"raised {type(error).__name__}: {error}"
    if culprit is None:
        where = f"for {len(batch.rows)} completions together, not for one alone; the first: {batch.shown(0)}"
    else:
        where = f"for {batch.shown(culprit)}" + (f", which alone takes more than {share:.2g} s" if timed_out else "")
    advice = "; raise its timeout, or make it faster" if timed_out else ""
    return RewardError(f"reward {reward.name!r} {what} {where}{advice}")


def _culprit(reward: Reward, batch: Batch, kind: type[BaseException], share: float) -> int | None:
    """The first completion that fails in this way when it is alone; looked for no longer than the timeout."""
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


def _checked(reward: Reward, values: Any, batch: Batch) -> list[float]:
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


def _is_async(reward: Reward) -> bool:
    function = inspect.unwrap(reward.function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _is_finite_number(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}"
