"""The contract that every reward function is held to: arguments, values, time limits, coroutines."""

from __future__ import annotations

import importlib
import math
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_core.config.inputs import RewardConfig
from grpo_core.errors import RewardError
from grpo_core.rewards import scoring
from grpo_core.rewards.batch import Batch
from grpo_core.rewards.contract import resolve
from grpo_core.rewards.scoring import score, score_arriving
from tests.grpo_core.rewards.conftest import Declare

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]


def test_a_function_gets_the_rollout_the_columns_and_its_arguments(declare: Declare) -> None:
    body = "def f(prompts, completions, completion_ids, answer, bonus, **columns):\n"
    body += "    assert (prompts, completion_ids) == (['1+1=', '2+2='], [[1], [2]])\n"
    body += "    return [bonus * (c == a) for c, a in zip(completions, answer)]\n"
    config = declare(body)(args={"bonus": 3})
    reward = resolve(config)
    assert reward.columns == {"answer": Any}
    assert score([reward], Batch(ROWS, ["2", "5"], [[1], [2]])) == [[3, 0]]


def test_none_means_not_scored() -> None:
    values = score([resolve(RewardConfig(function="exact_match"))], Batch([{**ROWS[0], "answer": None}], ["2"], [[1]]))
    assert math.isnan(values[0][0])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "def f(completions): return [1.0]",
            "returned 1 values for 2 completions; one each is needed. The first: prompt '1\\+1=', completion 'a'",
        ),
        ("def f(completions): return None", "returned NoneType"),
        ("def f(completions): return 'ab'", "returned str for 2 completions"),
        ("def f(completions): return [1.0, float('nan')]", "returned nan for prompt '2\\+2=', completion 'b'"),
        ("def f(completions): return [float('inf'), 0.0]", "returned inf for prompt '1\\+1='"),
        ("def f(completions): raise KeyError('x')", "raised KeyError: 'x' for prompt '1\\+1=', completion 'a'"),
        ("def f(completions): return [{'b': 1}[c] for c in completions[::-1]]", "raised KeyError: 'a' for prompt '1"),
        ("def f(completions): return [{'a': 1}[c] for c in completions]", "raised KeyError: 'b' for prompt '2"),
        (
            "def f(completions): return [1] if len(completions) == 1 else {}['x']",
            "raised KeyError: 'x' for 2 completions together, not for one alone; the first: prompt '1",
        ),
        (
            "async def f(completions): return [{'a': 1}[c] for c in completions]",
            "raised KeyError: 'b' for prompt '2\\+2=', completion 'b'",
        ),
        ("async def f(completions): return [1.0]", "returned 1 values for 2 completions"),
        ("def f(completions): return ['1', '0']", "returned '1' for prompt '1\\+1='"),
        ("def f(completions): return [0, [1]]", "returned \\[1\\] for prompt '2\\+2=', completion 'b'"),
        ("def f(completions): return [10**400, 0]", "returned 1000"),
        (
            "def f(completions): return [0, -1e25]",
            "returned -1e\\+25 for prompt '2\\+2=', completion 'b'; give",
        ),
        (
            "class Mute(Exception):\n    def __str__(self): return self.text\ndef f(completions): raise Mute",
            "raised Mute: \\(its text cannot be shown: its __str__ raises AttributeError\\) for prompt '1",
        ),
        ("def f(completions, bonus): return [0, 0]", "raised TypeError: .*missing .* 'bonus'"),
    ],
)
def test_a_broken_contract_is_reported_with_the_functions_name(declare: Declare, body: str, message: str) -> None:
    reward = resolve(declare(body)())
    with pytest.raises(RewardError, match=f"reward 'f' {message}"):
        score([reward], Batch(ROWS, ["a", "b"], [[1], [2]]))


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        ("exact_mach", {}, "there are exact_match, "),
        ("no_such_package.module:f", {}, "cannot be imported"),
        ("math:no_such_function", {}, "cannot be imported"),
        ("math:pi", {}, "is a float, not a function"),
        ("decimal:Decimal", {}, "is a class: write 'swift:decimal:Decimal' if it is a reward of ms-swift"),
        (":f", {}, "cannot be imported"),
        ("length", {"goal": 3}, "takes no argument \\['goal'\\]"),
    ],
)
def test_an_unusable_reward_is_refused_when_it_is_resolved(function: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        resolve(RewardConfig(function=function, args=args))


ENDLESS = {
    "a loop": "def wait():\n    while True: pass",
    "a wait": "def wait():\n    import threading; threading.Event().wait()",
    "a regular expression": "def wait():\n    import re; re.match(r'(a+)+$', 'a' * 60 + 'b')",
    "a loop that swallows errors": "def wait():\n    while True:\n        try: pass\n        except Exception: pass",
}


@pytest.mark.slow
@pytest.mark.parametrize("keyword", ["def", "async def"])
@pytest.mark.parametrize(
    "endless",
    [pytest.param(body, id=name, marks=[pytest.mark.e2e] * (name == "a loop")) for name, body in ENDLESS.items()],
)
def test_a_function_that_hangs_is_ended_and_named_with_the_completion_it_hangs_on(
    declare: Declare, monkeypatch: pytest.MonkeyPatch, endless: str, keyword: str
) -> None:
    monkeypatch.setattr(scoring, "GRACE", 0.1)
    body = f"{endless}\n{keyword} f(completions):\n    return [wait() if c == 'b' else 1.0 for c in completions]\n"
    config = declare(body)(timeout=0.3)
    message = r"reward 'f' did not come back within 0\.3 s for prompt '2\+2=', completion 'b', which alone takes more"
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(RewardError, match=message):
        score([resolve(config)], Batch(ROWS, ["a", "b"], [[1], [2]]))
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.slow
def test_a_coroutine_that_awaits_for_ever_is_ended_and_cancels_the_others(declare: Declare) -> None:
    body = "import asyncio\nended = []\n"
    body += "async def f(completions):\n    await asyncio.Event().wait()\n"
    body += "async def g(completions):\n    try: await asyncio.Event().wait()\n    finally: ended.append(1)\n"
    own = declare(body)
    with pytest.raises(RewardError, match="reward 'f' did not come back"):
        score([resolve(own("g")), resolve(own(timeout=0.2))], Batch(ROWS, ["a", "b"], [[1], [2]]))
    assert importlib.import_module("own_rewards").ended == [1]


# Coroutines that ignore cancellation. One that is not ended by force sleeps out its minute, which `slept` records.
UNCANCELLABLE = {
    "a long clean-up": "    try: await asyncio.sleep(60)\n    finally: slept.append(await asyncio.sleep(60))\n",
    "cancellation swallowed": "    for _ in range(4):\n        try: slept.append(await asyncio.sleep(60))\n"
    "        except BaseException: pass\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("body", UNCANCELLABLE.values(), ids=UNCANCELLABLE)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of what is ended by force
@pytest.mark.parametrize("alone", [True, False])
def test_a_coroutine_that_ignores_cancellation_is_ended_by_force_and_named(
    declare: Declare, monkeypatch: pytest.MonkeyPatch, body: str, alone: bool
) -> None:
    monkeypatch.setattr(scoring, "GRACE", 0.1)
    start = "import asyncio\nslept = []\nasync def g(completions): return [1.0] * len(completions)\n"
    body = f"{start}async def f(completions):\n{body}"
    own = declare(body)
    rewards = [resolve(own(function, timeout=0.2)) for function in ("f" if alone else "gf")]
    with pytest.raises(RewardError, match=r"reward 'f' did not come back within 0\.2 s"):
        score(rewards, Batch(ROWS, ["a", "b"], [[1], [2]]))
    assert not importlib.import_module("own_rewards").slept
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("keyword", ["def", "async def"])
def test_a_function_that_says_it_was_cancelled_is_named(declare: Declare, keyword: str) -> None:
    body = f"import asyncio\n{keyword} f(completions): raise asyncio.CancelledError('the client gave up')\n"
    body += "async def g(completions): return [1.0] * len(completions)\n"
    own = declare(body)
    with pytest.raises(RewardError, match="reward 'f' raised CancelledError: the client gave up for prompt '1"):
        score([resolve(own("g")), resolve(own())], Batch(ROWS, ["a", "b"], [[1], [2]]))


def test_asynchronous_functions_run_at_once(declare: Declare) -> None:
    """Each waits for the other: one after the other, neither would come back."""
    body = "import asyncio\nmet = asyncio.Barrier(2)\n"
    body += "async def f(completions):\n    await met.wait()\n    return [1.0, None]\n"
    body += "async def g(completions, bonus):\n    await met.wait()\n    return [bonus, 2.0]\n"
    body += "def h(completions):\n    return [3.0, 4.0]\n"
    own = declare(body)
    keys = [("g", {"args": {"bonus": 5.0}}), ("h", {}), ("f", {})]
    rewards = [resolve(own(function, timeout=20.0, **more)) for function, more in keys]
    values = score(rewards, Batch(ROWS, ["a", "b"], [[1], [2]]))
    assert values[:2] == [[5.0, 2.0], [3.0, 4.0]]
    assert values[2][0] == 1.0
    assert math.isnan(values[2][1])


WRAPPED = """
import asyncio, functools, inspect, time

async def slow(completions):
    await asyncio.sleep(0)
    return [float(ord(completion)) for completion in completions]

def plain(completions):
    return [float(ord(completion)) for completion in completions]

@functools.wraps(slow)
def runs_it_to_its_end(completions): return asyncio.run(slow(completions))

@functools.wraps(plain)
async def in_a_thread(completions): return await asyncio.to_thread(plain, completions)

@functools.wraps(slow)
def hands_its_coroutine_on(completions): return slow(completions)

given = functools.partial(in_a_thread)

class Object:
    async def __call__(self, completions): return await slow(completions)

an_object = Object()
of_an_object = functools.partial(an_object)
"""


@pytest.mark.parametrize(
    "function",
    ["runs_it_to_its_end", "in_a_thread", "hands_its_coroutine_on", "given", "an_object", "of_an_object"],
)
def test_a_wrapped_function_is_called_as_what_it_is_not_as_what_it_wraps(declare: Declare, function: str) -> None:
    reward = resolve(declare(WRAPPED)(function))
    assert score([reward], Batch(ROWS, ["a", "b"], [[1], [2]])) == [[97, 98]]


@pytest.mark.slow
def test_a_coroutine_that_a_plain_function_returns_has_its_time_limit(declare: Declare) -> None:
    body = "import asyncio\nasync def hang(): await asyncio.Event().wait()\ndef f(completions): return hang()\n"
    config = declare(body)(timeout=0.2)
    with pytest.raises(RewardError, match=r"reward 'f' did not come back within 0\.2 s"):
        score([resolve(config)], Batch(ROWS, ["a", "b"], [[1], [2]]))


def _batch_of(texts: list[str]) -> Batch:
    return Batch([{"prompt": "1+1="}] * len(texts), texts, [[1]] * len(texts))


def test_coroutines_get_through_with_what_is_there_while_more_is_sampled(declare: Declare) -> None:
    """The second completion comes only once the first is scored, which takes an answer from a server."""
    body = """
import asyncio
called, scored, counted = [], [], []
async def f(completions):
    called.append(completions)
    async def answer(reader, writer):
        writer.write(await reader.readline())
        writer.close()
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"%d\\n" % ord(completions[0]))
    values = [float(await reader.readline()) for _ in completions]
    writer.close()
    server.close()
    scored.append(completions)
    return values
def g(completions):
    counted.append(completions)
    return [1.0] * len(completions)
"""
    rewards = [resolve(each) for each in map(declare(body), "fg")]
    module = importlib.import_module("own_rewards")

    def arriving() -> Iterator[list[str]]:
        yield []
        yield ["a"]
        for _ in range(100_000):
            if module.scored:
                break
            yield []
        assert module.scored == [["a"]]
        yield ["b"]

    items, batch, columns, _ = score_arriving(rewards, arriving(), _batch_of)
    assert (items, batch.completions, columns) == (["a", "b"], ["a", "b"], [[97.0, 98.0], [1.0, 1.0]])
    assert module.called == [["a"], ["b"]]
    assert module.counted == [["a", "b"]]


def test_a_broken_reward_ends_the_sampling(declare: Declare) -> None:
    reward = resolve(declare("async def f(completions): raise ValueError('no')")())
    ended = []

    def endless() -> Iterator[list[str]]:
        try:
            yield ["a"]
            while True:
                yield []
        finally:
            ended.append(1)

    with pytest.raises(RewardError, match="reward 'f' raised ValueError: no"):
        score_arriving([reward], endless(), _batch_of)
    assert ended == [1]


def test_sampling_that_fails_says_so(declare: Declare) -> None:
    reward = resolve(declare("def f(completions): return [1.0]")())

    def failing() -> Iterator[list[str]]:
        yield ["a"]
        raise OSError("the engine is gone")

    with pytest.raises(OSError, match="the engine is gone"):
        score_arriving([reward], failing(), _batch_of)


@pytest.mark.slow
def test_time_in_which_a_function_runs_is_not_a_coroutines(declare: Declare) -> None:
    """The function takes longer than the coroutine may, and has an event loop of its own."""
    body = "import asyncio\nasync def f(completions):\n    await asyncio.sleep(0.1)\n    return [1.0]\n"
    body += "def g(completions):\n    asyncio.run(asyncio.sleep(1))\n    return [2.0]\n"
    own = declare(body)
    assert score([resolve(own(timeout=0.5)), resolve(own("g"))], _batch_of(["a"])) == [[1.0], [2.0]]


def test_a_function_with_an_alarm_of_its_own_keeps_it(declare: Declare) -> None:
    body = """
import signal, threading
def up(*_): raise InterruptedError
def f(completions):
    before = signal.signal(signal.SIGALRM, up)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try: threading.Event().wait()
    except InterruptedError: return [1.0, 2.0]
    finally: signal.signal(signal.SIGALRM, before)
"""
    reward = resolve(declare(body)(timeout=60.0))
    assert score([reward], Batch(ROWS, ["a", "b"], [[1], [2]])) == [[1.0, 2.0]]


def test_tensors_and_arrays_are_values_too(declare: Declare) -> None:
    body = "import numpy, torch\ndef f(completions): return torch.tensor([1.0, 2.0])\n"
    body += "def g(completions): return numpy.array([3, 4])\n"
    rewards = [resolve(each) for each in map(declare(body), "fg")]
    assert score(rewards, Batch(ROWS, ["a", "b"], [[1], [2]])) == [[1, 2], [3, 4]]


def test_a_long_prompt_is_shortened_in_a_message(declare: Declare) -> None:
    reward = resolve(declare("def f(completions): raise ValueError('no')")())
    with pytest.raises(RewardError) as error:
        score([reward], Batch([{"prompt": "x" * 10_000}], ["y" * 10_000], [[1]]))
    assert 300 < len(str(error.value)) < 600
