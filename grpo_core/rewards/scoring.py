"""Run the reward functions: each within its time limit, asynchronous ones concurrently; a failure names its completion.

Asynchronous functions start before the last completion is there, while the others are still being sampled, all on one
event loop, which is kept. An isolated function runs in its own process, which is ended, with all that it has started,
when its time is up.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from grpo_core.errors import RewardError
from grpo_core.rewards.batch import Batch, joined
from grpo_core.rewards.contract import Reward
from grpo_core.rewards.event_loop import GRACE, TimeIsUpError, loop, time_limit
from grpo_core.rewards.isolated import ProcessDiedError
from grpo_core.rewards.trl_arguments import CallLog, Logged
from grpo_core.system.progress import REWARDS, moved, phase

LARGEST = 1e18  # absolute value of a reward: the squares of larger ones are no float32 numbers

# What counts as the reward's failure; an interrupt does not.
FAILURES = (Exception, SystemExit, asyncio.CancelledError, TimeIsUpError)
Item = TypeVar("Item")


def score(rewards: Sequence[Reward], batch: Batch) -> list[list[float]]:
    """The B values per reward, NaN for None. Raises as `score_arriving` does."""
    _, _, columns, _ = score_arriving(rewards, ([part] for part in (batch,)), lambda parts: parts[0])
    return columns


@dataclass(frozen=True)
class _Answer:
    """A function's checked values for the rows that it scores, and what it logged in that call."""

    values: list[float]
    log: CallLog


def score_arriving(
    rewards: Sequence[Reward],
    arriving: Generator[Sequence[Item], None, None],
    batch_of: Callable[[list[Item]], Batch],
) -> tuple[list[Item], Batch, list[list[float]], list[Logged]]:
    """Score the items that `arriving` gives. Returns all items, as one batch too, the values per reward, and what the
    rewards logged per row.

    Functions that are `async def` are called with the items that have just arrived, and progress whenever `arriving`
    yields, even an empty list. The others run one after the other at the end, in this thread, with all items; a
    coroutine that one returns is run to its end. Raises RewardError, with the function's name, a prompt and the
    completion, if a function raises, exceeds its timeout, or returns anything but a finite number in its range or None
    per completion. `arriving` is then closed.
    """
    asynchronous = [reward for reward in rewards if reward.is_async]
    items: list[Item] = []
    parts: list[tuple[Batch, dict[str, _Answer]]] = []  # with the answers of asynchronous functions
    with closing(_Calls()) as calls:
        with closing(arriving):
            for new in arriving:
                moved()
                if new:
                    items += new
                    batch = batch_of(list(new))
                    parts.append((batch, calls.start(asynchronous, batch)))
                calls.turn()
        whole_batch = joined([batch for batch, _ in parts])
        synchronous = [(reward, whole_batch.scored_by(reward)) for reward in rewards if not reward.is_async]
        at_the_end = {reward.name: _run(reward, own) for reward, own in synchronous if own.rows}
        calls.finish()
    called = {reward.name: parts if reward.is_async else [(whole_batch, at_the_end)] for reward in rewards}
    columns: list[list[float]] = []
    logged = [Logged() for _ in whole_batch.rows]
    for reward in rewards:
        columns.append([math.nan] * len(logged))
        first = 0
        for part, answers in called[reward.name]:
            places = [first + i for i, row in enumerate(part.rows) if reward.scores(row)]
            first += len(part.rows)
            if places:
                answer = answers[reward.name]
                answer.log.add_to([logged[place] for place in places], reward.name)
                for place, value in zip(places, answer.values, strict=True):
                    columns[-1][place] = value
    return items, whole_batch, columns, logged


class _Calls:
    """The calls of asynchronous functions in one generation batch."""

    def __init__(self) -> None:
        self.under_way: dict[asyncio.Task[None], tuple[Reward, Batch]] = {}
        self.failed: list[tuple[Reward, Batch, BaseException]] = []  # in the order in which they did
        self.deadline = loop.ran + GRACE  # in seconds that the loop has run

    def start(self, rewards: Sequence[Reward], batch: Batch) -> dict[str, _Answer]:
        """Call the functions with the rows that they score. Returns what their answers will be put into, by name."""
        answers = dict[str, _Answer]()
        parts = [(reward, own) for reward in rewards if (own := batch.scored_by(reward)).rows]
        if parts:
            self._run_within_limits(asyncio.sleep(0))
        for reward, own in parts:
            self._start_call(reward, own, answers)
        return answers

    def _start_call(self, reward: Reward, batch: Batch, answers: dict[str, _Answer]) -> None:
        async def call() -> None:
            log = CallLog()
            try:
                values = await _awaited(reward, batch, log, reward.timeout)
                answers[reward.name] = _Answer(checked(reward, values, batch), log)
            except FAILURES as error:
                self.failed.append((reward, batch, error))

        _make_ready(reward)
        task = loop.get().create_task(call())
        task.add_done_callback(self.under_way.pop)
        self.under_way[task] = reward, batch
        self.deadline = max(self.deadline, loop.ran + reward.timeout + GRACE)

    def turn(self) -> None:
        """Let the calls progress as far as they can without waiting."""
        if self.under_way:
            self._run(asyncio.sleep(0))

    def finish(self) -> None:
        while self.under_way:
            self._run(asyncio.wait([*self.under_way], return_when=asyncio.FIRST_COMPLETED))

    def close(self) -> None:
        """Cancel the remaining calls."""
        loop.cancel([*self.under_way])

    def _run(self, work: Coroutine[Any, Any, Any]) -> None:
        """Let the loop run until the work is done. Raises RewardError if a call has failed."""
        with phase(REWARDS, ", ".join(sorted({reward.name for reward, _ in self.under_way.values()}))):
            self._run_within_limits(work)

    def _run_within_limits(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            with time_limit(max(self.deadline - loop.ran, 1e-3)):
                loop.run(work)
        except TimeIsUpError as time_is_up:  # a call that had to be interrupted has recorded nothing
            self.failed += [(*call, time_is_up) for call in self.under_way.values()]
        if self.failed:
            reward, batch, error = self.failed[0]
            if isinstance(error, ProcessDiedError):  # any of the calls under way in that process may have ended it
                calls = [(other, part) for other, part, _ in self.failed] + [*self.under_way.values()]
                batch = joined([*{id(part): part for other, part in calls if other is reward}.values()])
            self.close()  # the search for the completion that causes the failure uses the loop
            raise _explained(reward, batch, error) from error


def _run(reward: Reward, batch: Batch) -> _Answer:
    log = CallLog()
    with phase(REWARDS, reward.name):
        try:
            return _Answer(checked(reward, _call(reward, batch, log, reward.timeout), batch), log)
        except FAILURES as error:
            raise _explained(reward, batch, error) from error


def _call(reward: Reward, batch: Batch, log: CallLog, seconds: float) -> Any:
    """The function's answer. Raises TimeIsUpError if there is none after `seconds`."""
    _make_ready(reward)
    if reward.process or reward.is_async:
        run = asyncio.run if reward.process else loop.run  # a process keeps nothing on the loop of its caller
        with time_limit(seconds + GRACE):
            return run(_awaited(reward, batch, log, seconds))
    with time_limit(seconds):
        return plain_answer(reward, batch, log)


def _make_ready(reward: Reward) -> None:
    """Start the process of an isolated reward if it is not running: its imports do not count as time of the call."""
    if reward.process:
        reward.process.start()


def plain_answer(reward: Reward, batch: Batch, log: CallLog) -> Any:
    """The answer, in this process, of a function that is not `async def`; a coroutine that it returns is run."""
    answer = reward.function(**batch.arguments(reward, log))
    return loop.run(answer) if inspect.isawaitable(answer) else answer


async def _awaited(reward: Reward, batch: Batch, log: CallLog, seconds: float) -> Any:
    """The coroutine's answer; its time limit is among the loop's scopes while it runs."""
    if reward.process:
        answer: Any = reward.process.call(batch.read_by(reward), log)
    else:
        answer = reward.function(**batch.arguments(reward, log))
    try:
        async with asyncio.timeout(seconds) as scope:
            loop.scopes.add(scope)
            return await answer
    except (TimeoutError, asyncio.CancelledError):
        if scope.expired():
            raise TimeIsUpError from None
        raise
    finally:
        loop.scopes.discard(scope)


def _explained(reward: Reward, batch: Batch, error: BaseException) -> RewardError:
    """The failure as a RewardError that names the completion which causes it alone, if there is one.

    A RewardError already says what is wrong, and no completion causes it.
    """
    if isinstance(error, RewardError):
        named = f"reward {reward.name!r}"
        return error if str(error).startswith(named) else RewardError(f"{named}: {error}")
    timed_out = isinstance(error, TimeIsUpError)
    seconds_each = reward.timeout / len(batch.rows) if timed_out else reward.timeout
    culprit = _culprit(reward, batch, type(error), seconds_each)
    if timed_out:
        what, advice = f"did not come back within {reward.timeout:g} s", "; raise its timeout, or make it faster"
    elif isinstance(error, ProcessDiedError):
        what, advice = f"lost its process, which {error},", f"; {error.advice}"
    else:
        what, advice = f"raised {type(error).__name__}: {message_of(error)}", ""
        if reward.process and type(error).__name__ == "MemoryError":
            advice = f"; its process may take memory_gib = {reward.process.config.memory_gib:g}"
    if culprit is None:
        where = f"for {len(batch.rows)} completions together, not for one alone; the first: {batch.shown(0)}"
    else:
        where = f"for {batch.shown(culprit)}" + (
            f", which alone takes more than {seconds_each:.2g} s" if timed_out else ""
        )
    return RewardError(f"reward {reward.name!r} {what} {where}{advice}")


def message_of(error: BaseException) -> str:
    """The exception's text, or why it has none."""
    try:
        return str(error)
    except FAILURES as unsaid:
        return f"(its text cannot be shown: its __str__ raises {type(unsaid).__name__})"


def _culprit(reward: Reward, batch: Batch, kind: type[BaseException], seconds_each: float) -> int | None:
    """The first completion that fails in the same way alone; the search ends after the reward's timeout."""
    with suppress(RewardError):
        _make_ready(reward)
    deadline = time.monotonic() + reward.timeout
    for i in range(len(batch.rows)):
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        try:
            _call(reward, batch.only(i), CallLog(), min(seconds_each, left))
        except kind:
            return i
        except FAILURES:
            continue
    return None


def checked(reward: Reward, values: Any, batch: Batch) -> list[float]:
    """The values as numbers, NaN for None. Raises RewardError if they break the contract."""
    if isinstance(values, RewardError):  # by this same function in the reward's process
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
        if value is not None and abs(value) > LARGEST:
            raise RewardError(
                f"reward {reward.name!r} returned {value!r} for {batch.shown(i)}; give numbers up to {LARGEST:g}: "
                "divide all of them, or take a logarithm, since the deviation of larger ones cannot be computed"
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
