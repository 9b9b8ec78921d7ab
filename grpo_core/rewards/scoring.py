"""Run the reward functions on a batch: each within its time, the asynchronous ones at once, a failure named exactly."""

from __future__ import annotations

import asyncio
import inspect
import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from grpo_core.rewards.contract import Reward, RewardError

SHOWN = 200  # characters of a prompt or completion in a message
GRACE = 1.0  # seconds after which a coroutine that blocks or cleans up for long is ended like any function


class _TimeIsUpError(BaseException):
    """Not an Exception: a function's own `except Exception` must not swallow it."""


FAILURES = (
    Exception,
    SystemExit,
    asyncio.CancelledError,
    _TimeIsUpError,
)  # what a reward is blamed for; not an interrupt


@dataclass(frozen=True)
class _Batch:
    """B completions and what they belong to, row by row."""

    rows: Sequence[Mapping[str, Any]]  # dataset rows, "prompt" among their columns
    completions: Sequence[Any]  # texts, or conversations for conversational prompts
    completion_ids: Sequence[list[int]]

    def only(self, i: int) -> _Batch:
        return _Batch([self.rows[i]], [self.completions[i]], [self.completion_ids[i]])

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


def score(
    rewards: Sequence[Reward],
    rows: Sequence[Mapping[str, Any]],
    completions: Sequence[Any],
    completion_ids: Sequence[list[int]],
) -> list[list[float]]:
    """For each reward the B values of the B completions, NaN for None.

    Functions run one after the other in this thread; those that are `async def` then all at once. RewardError, with
    the function's name, a prompt and the completion, when one raises, returns something else than B finite numbers in
    its range or None, or does not come back within its timeout.
    """
    batch = _Batch(rows, completions, completion_ids)
    values = {reward.name: _run(reward, batch) for reward in rewards if not _is_async(reward)}
    values |= _run_together([reward for reward in rewards if _is_async(reward)], batch)
    return [_checked(reward, values[reward.name], batch) for reward in rewards]


def _run(reward: Reward, batch: _Batch) -> Any:
    try:
        return _call(reward, batch, reward.timeout)
    except FAILURES as error:
        raise _explained(reward, batch, error) from error


def _run_together(rewards: Sequence[Reward], batch: _Batch) -> dict[str, Any]:
    """All at once; the first failure cancels the others."""

    values: dict[str, Any] = {}
    failed: list[tuple[Reward, BaseException]] = []  # in the order in which they did

    async def one(reward: Reward) -> None:
        try:
            values[reward.name] = await _awaited(reward, batch, reward.timeout)
        except FAILURES as error:
            failed.append((reward, error))
            raise

    async def together() -> None:
        async with asyncio.TaskGroup() as group:
            for reward in rewards:
                group.create_task(one(reward))

    if not rewards:
        return {}
    try:
        with _time_limit(max(reward.timeout for reward in rewards) + GRACE):
            asyncio.run(together())
    except (BaseExceptionGroup, asyncio.CancelledError, _TimeIsUpError):
        # Who was ended by force, and clung to its time even so, has noted nothing.
        failed += [(reward, _TimeIsUpError()) for reward in rewards if reward.name not in values]
    if failed:
        reward, error = failed[0]
        raise _explained(reward, batch, error) from error
    return values


def _call(reward: Reward, batch: _Batch, seconds: float) -> Any:
    """The function's answer; _TimeIsUpError when there is none after `seconds`."""
    if _is_async(reward):
        with _time_limit(seconds + GRACE):
            return asyncio.run(_awaited(reward, batch, seconds))
    with _time_limit(seconds):
        return reward.function(**batch.arguments(reward))


async def _awaited(reward: Reward, batch: _Batch, seconds: float) -> Any:
    answer: Any = reward.function(**batch.arguments(reward))
    try:
        async with asyncio.timeout(seconds) as scope:
            return await answer
    except (TimeoutError, asyncio.CancelledError):
        if scope.expired():
            raise _TimeIsUpError from None
        raise


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


def _explained(reward: Reward, batch: _Batch, error: BaseException) -> RewardError:
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


def _culprit(reward: Reward, batch: _Batch, kind: type[BaseException], share: float) -> int | None:
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


def _checked(reward: Reward, values: Any, batch: _Batch) -> list[float]:
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
