"""Rewards get arguments of their own, know the place in the training, and log what they find, wherever they run."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from grpo_core.config.inputs import RewardConfig
from grpo_core.errors import RewardError
from grpo_core.rewards.batch import Batch
from grpo_core.rewards.contract import Reward, resolve
from grpo_core.rewards.scoring import score, score_arriving
from grpo_core.rewards.trl_arguments import Logged, TrainerState
from tests.grpo_core.rewards.conftest import Declare

BODY = """
import numpy
def spoil(completions, completion_ids, prompts, tests, names):
    for completion, ids, prompt, own in zip(completions, completion_ids, prompts, tests):
        completion[0]["content"] = "MUTATED"
        ids.clear()
        prompt.append({"role": "user", "content": "more"})
        own["cases"].append("1 == 1")
    completions.reverse()
    names.append("z")
    return [float(len(names))] * len(completions)
async def spoil_later(completions, completion_ids, prompts, tests, names):
    return spoil(completions, completion_ids, prompts, tests, names)
def look(completions, completion_ids, prompts, tests):
    sizes = zip(completion_ids, prompts, tests)
    return [float(f"{len(ids)}{len(prompt)}{len(own['cases'])}") for ids, prompt, own in sizes]
def read(completions):
    return [float(completion[0]["content"]) for completion in completions]
buffer = numpy.zeros(1)
async def kept(completions):
    buffer[:] = [float(completion[0]["content"]) for completion in completions]
    return buffer
def place(completions, trainer_state):
    return [trainer_state.global_step + trainer_state.epoch / trainer_state.max_steps] * len(completions)
def place_by_name(completions, trainer_state, **others):
    return place(completions, trainer_state)
def logs(completions, log_extra, log_metric):
    texts = [completion[0]["content"] for completion in completions]
    log_extra("read", [int(text) if text != "3" else None for text in texts])
    for text in texts:
        log_extra("one by one", [text])
    log_metric("mean", sum(map(float, texts)) / len(texts))
    log_metric("sometimes", float("nan"))
    return [0.0] * len(texts)
async def logs_later(completions, log_extra, log_metric):
    return logs(completions, log_extra, log_metric)
def takes_any(completions, **others):
    return logs(completions, others["log_extra"], others["log_metric"])
def too_few(completions, log_extra):
    log_extra("read", ["1"])
    return [0.0] * len(completions)
def no_number(completions, log_metric):
    log_metric("mean", "high")
    return [0.0] * len(completions)
def bad_name(completions, log_metric):
    log_metric("share/%", 1.0)
    return [0.0] * len(completions)
"""
STATE = TrainerState(global_step=3, max_steps=8, epoch=2.0)


def _batch() -> Batch:
    rows = [{"prompt": [{"role": "user", "content": "p"}], "tests": {"cases": [1, 2]}} for _ in range(3)]
    return Batch(rows, [[{"role": "assistant", "content": text}] for text in "123"], [[1], [2], [3]], state=STATE)


@pytest.fixture
def reward(declare: Declare) -> Callable[..., Reward]:
    own = declare(BODY, "trl_rewards")
    return lambda function, **keys: resolve(own(function, **keys))


ISOLATED = [False, pytest.param(True, marks=pytest.mark.slow)]


@pytest.mark.parametrize("isolated", ISOLATED)
@pytest.mark.parametrize("name", ["spoil", "spoil_later"])
def test_a_reward_that_changes_its_arguments_changes_nothing_else(
    reward: Callable[..., Reward], name: str, isolated: bool
) -> None:
    spoils = reward(name, args={"names": ["a"]}, isolated=isolated)
    batch, untouched = _batch(), copy.deepcopy(_batch())
    expected = [[2.0] * 3, [112.0] * 3, [1.0, 2.0, 3.0]]
    assert score([spoils, reward("look"), reward("read")], batch) == expected
    assert score([spoils], batch) == [[2.0] * 3], "the configured args are those of the first call"
    assert batch == untouched


def test_values_are_those_that_a_reward_returned_and_not_what_it_writes_over_them_later(
    reward: Callable[..., Reward],
) -> None:
    arriving = ([_batch().only(i)] for i in range(3))
    _, _, columns, _ = score_arriving([reward("kept")], arriving, lambda parts: parts[0])
    assert columns == [[1.0, 2.0, 3.0]]


@pytest.mark.parametrize("isolated", ISOLATED)
def test_a_reward_that_asks_is_told_the_place_in_the_training(reward: Callable[..., Reward], isolated: bool) -> None:
    known = reward("place_by_name", isolated=isolated)
    assert known.reads_state and "trainer_state" not in known.columns
    assert score([known, reward("place")], _batch()) == [[3.25] * 3] * 2
    assert not reward("takes_any").reads_state


@pytest.mark.parametrize("isolated", ISOLATED)
@pytest.mark.parametrize("name", ["logs", "logs_later", "takes_any"])
def test_what_rewards_log_reaches_each_completion(reward: Callable[..., Reward], name: str, isolated: bool) -> None:
    named = {"name": "mine", "isolated": isolated}
    _, _, _, logged = score_arriving([reward(name, **named)], iter_of(_batch()), lambda parts: parts[0])
    figures = {"mine/mean": 2.0}
    assert logged == [
        Logged({"mine/read": "1", "mine/one by one": "1"}, figures),
        Logged({"mine/read": "2", "mine/one by one": "2"}, figures),
        Logged({"mine/read": None, "mine/one by one": "3"}, figures),
    ]


def iter_of(batch: Batch) -> Any:
    def arriving() -> Iterator[list[Batch]]:
        yield [batch]

    return arriving()


@pytest.mark.parametrize(
    ("name", "isolated", "message"),
    [
        ("too_few", False, r"log_extra\('read'\) got 1 values for 3 completions; one each is needed"),
        ("no_number", False, r"log_metric\('mean', 'high'\): the value is not a number"),
        ("bad_name", False, r"log_metric\('share/%', …\): a name has letters, digits"),
        pytest.param("bad_name", True, r"log_metric\('share/%', …\): a name has", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_be_logged_is_refused_with_the_rewards_name(
    reward: Callable[..., Reward], name: str, isolated: bool, message: str
) -> None:
    with pytest.raises(RewardError, match=f"^reward '{name}': {message}"):
        score([reward(name, isolated=isolated)], _batch())


@pytest.mark.slow
def test_the_functions_that_come_with_trl_run_as_they_are() -> None:
    answers = ["\\boxed{4}", "\\boxed{5}"]
    batch = Batch(
        [{"prompt": [], "solution": "$4$"}] * 2, [[{"role": "assistant", "content": it}] for it in answers], [[1], [1]]
    )
    known = resolve(RewardConfig(function="trl.rewards:accuracy_reward"))
    _, _, columns, logged = score_arriving([known], iter_of(batch), lambda parts: parts[0])
    assert columns == [[1.0, 0.0]]
    assert [it.columns["accuracy_reward/solution"] for it in logged] == ["$4$", "$4$"]
    assert not math.isnan(columns[0][0])


@pytest.mark.slow
def test_the_rewards_of_trls_example_for_images_run_unchanged_or_as_built_in_ones() -> None:
    """The page on own rewards says so."""
    trl_rewards = pytest.importorskip("trl.rewards", reason="needs requirements/bench.txt")
    texts = [
        "<think>\nOf 3, 2.\n</think>\nThe answer is $\\frac{2}{3}$.",
        "<think>1</think> \\boxed{\\frac{1}{3}}",
        "<think>a<think>b</think> \\boxed{\\frac{2}{3}}",
        " <think>a</think>",
        "",
    ]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    solution = "$\\frac{2}{3}$"
    pattern = "<think>(?!.*<think>).*?</think>.*"
    configs = [
        RewardConfig(function="trl.rewards:think_format_reward"),
        RewardConfig(function="format_regex", args={"pattern": pattern}),
        RewardConfig(function="trl.rewards:accuracy_reward"),
        RewardConfig(function="math_answer"),
    ]
    row = {"prompt": [{"role": "user", "content": "How many?"}], "solution": solution, "answer": solution}
    form, built_in_form, right, built_in_right = score(
        [*map(resolve, configs)], Batch([row] * len(texts), completions, [[1]] * len(texts))
    )
    assert form == built_in_form == trl_rewards.think_format_reward(completions) == [1, 1, 0, 0, 0]
    assert (
        right == built_in_right == trl_rewards.accuracy_reward(completions, [solution] * len(texts)) == [1, 0, 1, 0, 0]
    )
