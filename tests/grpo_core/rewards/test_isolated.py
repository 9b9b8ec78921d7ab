"""Isolated rewards: the same results as in the training's process, and no harm to it from what ends, blocks or fills
its process."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_core.config.inputs import RewardConfig
from grpo_core.errors import RewardError
from grpo_core.rewards import isolated as isolation
from grpo_core.rewards.batch import Batch
from grpo_core.rewards.contract import Reward, resolve, source_of
from grpo_core.rewards.isolated import draws_state, set_draws_state
from grpo_core.rewards.scoring import score, score_arriving
from grpo_core.training.loop import train
from tests.conftest import make_run
from tests.grpo_core.rewards.conftest import Declare
from tests.grpo_core.rewards.harmful import HARMFUL
from tests.grpo_core.training.training import assert_same, metrics_of, trained_run
from tests.processes import existing
from tests.visible_gpus import using_gpu

pytestmark = pytest.mark.served

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}, {"prompt": "3+3=", "answer": "6"}]
BATCH = Batch(ROWS, ["a", "b", "c"], [[1], [2], [3]])
HARMLESS = Batch(ROWS[:1], ["a"], [[1]])


@pytest.fixture
def declared(declare: Declare) -> Callable[..., RewardConfig]:
    return partial(declare(HARMFUL, "harmful"), isolated=True)


def _pids(output: str) -> list[int]:
    return [int(pid) for line in output.splitlines() if line.startswith("pids ") for pid in line.split()[1:]]


def _forgotten(pids: Sequence[int]) -> bool:
    """Whether these have not only ended, but left the table of processes."""
    deadline = time.monotonic() + 15
    while left := any(map(psutil.pid_exists, pids)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return not left


def _gone(pids: list[int]) -> bool:
    return not psutil.wait_procs(existing(pids), timeout=15)[1]


HARMS = [
    ("ends", r"lost its process, which ended with exit status 0, for prompt '2\+2=', completion 'b'; let the func"),
    ("kills_itself", r"lost its process, which was ended by SIGKILL, for prompt '2\+2=', completion 'b'; .* = 1,"),
    ("leaves", r"raised SystemExit: enough for prompt '2\+2=', completion 'b'$"),
    ("takes_memory", r"raised MemoryError:  for prompt .* 'b'; its process may take memory_gib = 1$"),
    ("gives_what_cannot_be_pickled", r"returned <function .*lambda.* for prompt '2\+2=', completion 'b'; return"),
]
RARER_HARMS = [
    ("faults", r"lost its process, which was ended by SIGSEGV, for prompt '2\+2=', completion 'b'; look for a fau"),
    ("closes_everything", r"lost its process, which ended with exit status 1, for prompt '2\+2=', completion 'b'"),
    ("gives_up", r"raised GeneratorExit: enough for prompt '2\+2=', completion 'b'$"),
    ("keeps_files", r"raised OSError: .*Too many open files: '/dev/null' for prompt '2\+2=', completion 'b'$"),
    ("raises_what_cannot_be_pickled", r"raised Odd: odd for prompt '2\+2=', completion 'b'$"),
]


@pytest.mark.parametrize(
    ("name", "message"), [*HARMS, *(pytest.param(*harm, marks=pytest.mark.e2e) for harm in RARER_HARMS)]
)
def test_what_harms_its_process_is_named_and_runs_again(
    declared: Callable[..., RewardConfig], name: str, message: str
) -> None:
    reward = resolve(declared(name, memory_gib=1.0))
    with pytest.raises(RewardError, match=f"^reward '{name}' {message}"):
        score([reward], BATCH)
    assert score([reward], HARMLESS) == [[1.0]]
    assert "harmful" not in sys.modules


@pytest.mark.parametrize(
    ("name", "started"), [pytest.param("blocks", 2, marks=pytest.mark.e2e), ("stops_its_guard", 3)]
)
def test_a_function_that_ignores_its_time_limit_is_killed_with_all_that_it_started(
    declared: Callable[..., RewardConfig], capfd: pytest.CaptureFixture[str], name: str, started: int
) -> None:
    reward = resolve(declared(name, timeout=1.0))
    with pytest.raises(RewardError, match=r"did not come back within 1 s for prompt '2\+2=', completion 'b', which al"):
        score([reward], BATCH)
    pids = _pids(capfd.readouterr().out)
    assert len(pids) == 2 * started  # two attempts: all completions, and "b" alone
    assert _gone(pids)
    assert score([reward], HARMLESS) == [[1.0]]


def test_sigkill_of_the_training_leaves_nothing_of_a_reward(
    declared: Callable[..., RewardConfig], tmp_path: Path
) -> None:
    """Though a process that the training has forked keeps everything open that the training had open."""
    code = """
import sys; sys.path.insert(0, sys.argv[1])
import os, psutil, signal
from grpo_core.rewards.batch import Batch
from grpo_core.rewards.scoring import score
from grpo_core.rewards.contract import RewardConfig, resolve
reward = resolve(RewardConfig(function="harmful:blocks", isolated=True))
print("pids", *(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
fork = os.fork() or signal.pause()
print(fork, flush=True)
score([reward], Batch([{"prompt": ""}], ["b"], [[1]]))
"""
    asker = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert asker.stdout is not None
    started = _pids(asker.stdout.readline())
    fork = int(asker.stdout.readline())
    pids = started + _pids(asker.stdout.readline())  # it is in the midst of its call now
    assert len({*pids}) == 3, "guard, worker and what that has started"
    asker.kill()
    asker.wait()
    try:
        assert _gone(pids)
    finally:
        os.kill(fork, signal.SIGKILL)


def test_processes_that_a_function_leaves_are_forgotten_while_it_lives(declared: Callable[..., RewardConfig]) -> None:
    reward = resolve(declared("leaves_orphans"))
    ((*pids,),) = score([reward], BATCH)
    assert _forgotten([int(pid) for pid in pids])
    assert len(score([reward], BATCH)[0]) == len(BATCH.completions)


def test_what_a_function_changes_in_its_process_stays_there(
    declared: Callable[..., RewardConfig], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    gc.collect()  # processes of other tests' rewards
    before, num_open = (Path.cwd(), dict(os.environ), signal.getsignal(signal.SIGTERM)), psutil.Process().num_fds()
    others = psutil.Process().children()
    reward = resolve(declared("meddles"))
    assert score([reward], BATCH) == [[3.0, 3.0, 3.0]]
    assert capfd.readouterr().out.count("x") == 1 << 20
    with pytest.raises(RewardError, match="raised ValueError: I/O operation on closed file"):
        score([reward], BATCH)  # it stays as it was changed, as it would in the training's process
    (guard,) = {*psutil.Process().children()} - {*others}
    pids = [guard.pid, *(child.pid for child in guard.children(recursive=True))]
    del reward
    gc.collect()  # the error's traceback names it
    assert _gone(pids), "with the reward its process ends"
    assert (Path.cwd(), dict(os.environ), signal.getsignal(signal.SIGTERM)) == before
    assert psutil.Process().num_fds() <= num_open  # what other tests have left may be closed meanwhile


def test_a_function_that_says_cuda_takes_the_gpu_of_the_process_that_asks(
    declared: Callable[..., RewardConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    asked = "[int(os.environ[name].partition(',')[0]) for name in ('CUDA_VISIBLE_DEVICES', 'LOCAL_RANK')]"
    with using_gpu(2, 4):
        reward = resolve(declared("says"))
        assert score([reward], Batch([{"prompt": "", "answer": asked}] * 2, ["a", "b"], [[1], [2]])) == [[6.0, 0.0]]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_of_calls_under_way_together_the_one_that_ended_the_process_is_named(
    declared: Callable[..., RewardConfig], tmp_path: Path
) -> None:
    reward = resolve(declared("ends_when_all_are_there"))

    def batch_of(places: list[int]) -> Batch:
        return Batch([ROWS[i] for i in places], [BATCH.completions[i] for i in places], [[1] for _ in places])

    with pytest.raises(
        RewardError, match=r"process, which ended with exit status 3, for [^,]*, completion 'b'; let the"
    ):
        score_arriving([reward], ([place] for place in range(3)), batch_of)


def test_a_process_that_ends_between_two_calls_is_started_again_and_said(
    declared: Callable[..., RewardConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    others = psutil.Process().children()
    reward = resolve(declared("an_object"))
    (guard,) = {*psutil.Process().children()} - {*others}
    guard.children()[0].kill()
    os.waitid(os.P_PID, guard.pid, os.WEXITED | os.WNOWAIT)
    assert score([reward], HARMLESS) == [[1.0]]
    assert "reward 'an_object': its process was ended by SIGKILL between two calls" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["with_a_bonus", "an_object", "hands_on", "takes_any"])
def test_objects_partials_and_coroutines_give_what_they_give_in_the_training(
    declared: Callable[..., RewardConfig], name: str
) -> None:
    args = {"bonus": 5.0} if name in ("with_a_bonus", "an_object") else {}
    there, here = (resolve(declared(name, args=args, isolated=isolated)) for isolated in (True, False))
    assert score([there], BATCH) == score([here], BATCH)
    assert (there.accepts, there.columns, there.is_async) == (here.accepts, here.columns, here.is_async)


def test_the_types_of_columns_are_known_without_importing_the_function(declared: Callable[..., RewardConfig]) -> None:
    there, here = (resolve(declared("typed", isolated=isolated)) for isolated in (True, False))
    assert there.columns == {"answer": str, "n": int | None, "m": list, "o": Any, "p": Any}
    assert there.columns.keys() == here.columns.keys()
    assert source_of(declared("typed")) == source_of(declared("typed", isolated=False))


NUMBERS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.floats(width=32, allow_nan=False, allow_infinity=False).map(np.float32),
    st.decimals(allow_nan=False, allow_infinity=False),
)
ODDITIES = st.one_of(
    NUMBERS,
    st.text(max_size=3),
    st.lists(st.integers(), max_size=2),
    st.complex_numbers(allow_nan=False, allow_infinity=False),
    st.dictionaries(st.integers(), st.integers(), max_size=1),
)
ANSWERS = st.one_of(
    st.lists(NUMBERS, min_size=3, max_size=3).map(repr),
    st.lists(NUMBERS, min_size=3, max_size=3).map(lambda values: f"np.array({values!r}, dtype=float)"),
    st.lists(ODDITIES, max_size=4).map(repr),
    ODDITIES.map(repr),
    st.text(max_size=4),
    st.sampled_from(
        ["[{'a': 1.0, 'c': None}[c] for c in completions]", "sys.exit(3)", "1 / 0", "asyncio.run()", "iter([1.0])"]
    ),
)


def test_an_isolated_function_gives_the_same_values_and_errors(declared: Callable[..., RewardConfig]) -> None:
    there, here = (resolve(declared("says", isolated=isolated, range=[-1e6, 1e6])) for isolated in (True, False))

    def outcome(reward: Reward, answer: str) -> str:
        try:
            return repr(score([reward], replace(BATCH, rows=[{"prompt": "1+1=", "answer": answer}] * 3)))
        except RewardError as error:
            return str(error)

    @settings(max_examples=150)
    @given(ANSWERS)
    def same(answer: str) -> None:
        assert outcome(there, answer) == outcome(here, answer)

    same()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import os; os._exit(3)", "its process ended with exit status 3 while importing it; let the function"),
        ("import threading; threading.Event().wait()", "its process had not done so after 2 s"),
        ("import nowhere", "it imports 'nowhere', which is not there"),
        ("def f(): pass", "takes no argument \\['bonus'\\]; it takes \\[\\]"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(
    declare: Declare, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    monkeypatch.setattr(isolation, "START_SECONDS", 2.0 if "Event" in body else isolation.START_SECONDS)
    with pytest.raises(RewardError, match=message):
        resolve(declare(body)(isolated=True, args={"bonus": 1.0}))


def test_random_numbers_are_those_that_the_training_would_draw(declared: Callable[..., RewardConfig]) -> None:
    for names in (("draws", "draws"), ("draws_together",)):
        drawn = []
        for isolated in (False, True):
            rewards = [resolve(declared(name, isolated=isolated, name=f"{i}")) for i, name in enumerate(names)]
            random.seed(7)
            np.random.seed(7)
            drawn.append(([score(rewards, BATCH) for _ in range(2)], random.random(), np.random.random()))
        assert drawn[1] == drawn[0]


def test_the_state_of_each_generator_is_carried_whole() -> None:
    def drawn() -> Any:
        return random.gauss(), np.random.standard_normal(3).tolist(), torch.rand(3).tolist()

    random.gauss()
    state = draws_state()
    before = drawn()
    drawn()
    assert set_draws_state(state) == {"python", "numpy", "torch"}
    assert drawn() == before


def test_a_training_whose_reward_ends_its_process_goes_on_from_its_checkpoint_as_if_nothing_had_happened(
    declared: Callable[..., RewardConfig], values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the very weights of a training whose reward was not isolated: random numbers included."""
    monkeypatch.chdir(tmp_path)
    values["rewards"] = [{"function": "harmful:draws_and_ends_once", "isolated": True}]
    run = make_run(tmp_path / "run", values)
    with pytest.raises(RewardError, match="exit status 9, for 16 completions together, not for one alone"):
        train(run, run / "training")
    assert len(metrics_of(run)) == 2
    train(run, run / "training")
    values["rewards"][0]["isolated"] = False
    assert_same(run, trained_run(tmp_path / "whole", values))
