"""A judge that is down, slow, over budget or without a grade: named, asked no more, and no completion blamed."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from grpo_core.config.inputs import RewardConfig
from grpo_core.errors import RewardError
from grpo_core.rewards import scoring
from grpo_core.rewards.batch import Batch
from grpo_core.rewards.builtin.judge import judge
from grpo_core.rewards.builtin.judge_client import connect
from grpo_core.rewards.contract import resolve
from grpo_core.rewards.scoring import score, score_arriving
from tests.grpo_core.rewards.judging import by_length, completed, contents, judging, material
from tests.serving import free_ports

BROKEN = {
    "no grade": completed("It is good."),
    "cut off": completed("Score: 10", "length"),
    "refused": completed(None),
    "no choice": {**completed("Score: 10"), "choices": []},
    "null": {**completed("Score: 10"), "choices": None},
    "another shape": {"choices": [{"text": "Score: 10"}]},
    "a list": [],
    "a page": b"<html>Score: 10</html>",
    "a number beyond any": completed(f"Score: {'9' * 5000}"),
    "tokens in words": {**completed("10"), "usage": {"total_tokens": "many"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("answer", BROKEN.values(), ids=BROKEN)
def test_an_answer_without_a_grade_is_asked_for_again_and_scores_nothing(graded: Any, answer: Any) -> None:
    with judging(lambda *_: (200, answer)) as server:
        assert graded(server.url, "a") == [None]
        assert len(server.questions) == 3


@pytest.mark.slow
def test_a_judge_without_grades_is_refused(graded: Any) -> None:
    with judging(lambda question, _: f"Score: {10 if material(question)[-1] == 'good' else 'none'}") as server:
        assert graded(server.url, *map(str, range(19))) == [None] * 19
        assert graded(server.url, "good") == [1]
        assert graded(server.url, *map(str, range(19))) == [None] * 19
        with pytest.raises(RewardError, match="gave 20 completions in a row no grade in the form asked for"):
            graded(server.url, "x")


@pytest.mark.slow
def test_a_judge_that_is_down_is_named_and_no_completion_is_blamed(tmp_path: Path) -> None:
    [port] = free_ports(1)
    arguments = {"model": "m", "base_url": f"http://127.0.0.1:{port}/v1", "cache": str(tmp_path), "max_retries": 1}
    reward = resolve(RewardConfig(function="judge", args=arguments))
    batch = Batch([{"prompt": "some prompt"}] * 3, ["a", "b", "c"], [[1]] * 3)
    with pytest.raises(RewardError) as error:
        score([reward], batch)
    said = str(error.value)
    assert said.startswith(f"reward 'judge': the judge 'm' at http://127.0.0.1:{port}/v1 does not answer")
    assert "some prompt" not in said


@pytest.mark.parametrize(
    ("status", "asked", "message"),
    [
        (500, 2, "does not answer: Error code: 500 - .*no such model"),
        (401, 1, "refuses: Error code: 401 - .*no such model"),
        (404, 1, "refuses: Error code: 404 - .*no such model"),
        (400, 2, "refuses whatever it is asked: Error code: 400 - .*no such model"),
    ],
)
def test_a_judge_that_refuses_is_asked_no_more_and_nothing_is_scored(
    graded: Any, status: int, asked: int, message: str
) -> None:
    with judging(lambda *_: (status, {"error": {"message": "no such model"}})) as server:
        with pytest.raises(RewardError, match=message):
            graded(server.url, "a", max_retries=1)
        assert len(server.questions) == asked


@pytest.mark.parametrize("status", [400, 413])
def test_a_question_that_the_server_refuses_gets_no_grade_and_the_others_theirs(graded: Any, status: int) -> None:
    """A question beyond the judge's context is one: a restart would sample the same completions again."""

    def says(question: str, _: int) -> Any:
        return (status, {"error": {"message": "too long"}}) if "long" in material(question)[-1] else "Score: 10"

    with judging(says) as server:
        with pytest.warns(
            UserWarning, match=r"the judge 'm' at .* refuses 2 of 3 questions, .* \(2 so far\): .*too long"
        ):
            assert graded(server.url, "a", "long", "longer") == [1, None, None]
        assert len(server.questions) == 4, "each once, and one to see whether it answers any"
        with pytest.warns(UserWarning, match=r"refuses 1 of 2 questions, .*\(3 so far\)"):
            assert graded(server.url, "a", "long") == [1, None]


class _Answered(logging.Handler):
    """Sets an event when the client has read an answer of this status."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status, self.event = status, threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if f" {self.status} " in record.getMessage():
            self.event.set()


def test_gradings_under_way_when_another_fails_are_kept(
    graded: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """This holds across calls: each group of completions is one."""
    caplog.set_level(logging.INFO)
    logging.getLogger().addHandler(failure := _Answered(401))
    met = threading.Barrier(3)

    def says(question: str, _: int) -> Any:
        met.wait(timeout=600)
        if material(question)[-1] == "bad":
            return 401, {"error": {"message": "who are you?"}}
        assert failure.event.wait(timeout=600)
        return "Score: 10"

    arguments = {"model": "m", "cache": str(tmp_path / "cache"), "max_retries": 0, "concurrency": 3}
    try:
        with judging(says) as server:
            reward = resolve(RewardConfig(function="judge", args={**arguments, "base_url": server.url}))
            with pytest.raises(RewardError, match=r"reward 'judge': the judge 'm' at .* refuses: .*who are you"):
                score_arriving(
                    [reward],
                    (part for part in (["bad"], ["a", "b"], ["c"])),
                    lambda texts: Batch([{"prompt": "p"}] * len(texts), texts, [[1]] * len(texts)),
                )
            assert len(server.questions) == 3, "nothing more is asked"
    finally:
        logging.getLogger().removeHandler(failure)
    with judging(by_length) as server:
        assert graded(server.url, "a", "b", "c") == [1, 1, 0]
        assert len(server.questions) == 1
    assert contents(tmp_path / "cache")["tokens"] == 300


def test_a_call_that_begins_while_a_failed_one_closes_asks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing, closed, second_open = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def slow_to_close(*arguments: Any) -> AsyncIterator[Any]:
        if closing.is_set():
            second_open.set()
        async with connect(*arguments) as client:
            try:
                yield client
            finally:
                closing.set()
                await closed.wait()

    async def two_calls(url: str) -> list[Any]:
        arguments = {"model": "m", "base_url": url, "cache": str(tmp_path / "cache"), "max_retries": 0}
        first = asyncio.create_task(judge(["p"], ["bad"], **arguments))
        await closing.wait()
        second = asyncio.create_task(judge(["p"], ["good"], **arguments))
        await second_open.wait()
        closed.set()
        return await asyncio.gather(first, second, return_exceptions=True)

    monkeypatch.setattr("grpo_core.rewards.builtin.judge.connect", slow_to_close)
    with judging(lambda *_: (401, {"error": {"message": "who are you?"}})) as server:
        failures = asyncio.run(two_calls(server.url))
        assert len(server.questions) == 1
    assert all(isinstance(failure, RewardError) for failure in failures)


@pytest.mark.slow
def test_a_judge_that_hangs_is_named_within_the_rewards_time_and_not_asked_again(
    graded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "GRACE", 60.0)  # on a busy machine the event loop may stand still for a while
    with judging(lambda _, number: "Score: 10" if number == 1 else "") as server:
        graded(server.url, "first")  # what is loaded once takes no time of the next
        arguments = {"model": "m", "base_url": server.url, "cache": str(tmp_path / "cache")}
        reward = resolve(RewardConfig(function="judge", args=arguments, timeout=0.5))
        batch = Batch([{"prompt": "some prompt"}] * 8, [*"abcdefgh"], [[1]] * 8)
        with pytest.raises(RewardError) as error:
            score([reward], batch)
        assert len(server.questions) <= 9
    said = str(error.value)
    assert said.startswith(f"reward 'judge': the judge 'm' at {server.url} has left 8 of 8 questions without an answer")
    assert "request_timeout=60 s" in said
    assert "some prompt" not in said


def test_a_cache_that_cannot_be_used_is_named(graded: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RewardError, match=r"cache='.*/file' cannot be used: .* name a folder"):
        graded("http://127.0.0.1:1/v1", "a", cache=str(tmp_path / "file"))


def test_a_judge_that_never_answers_is_given_up(graded: Any) -> None:
    with judging(lambda *_: "") as server, pytest.raises(RewardError, match="does not answer: Request timed out"):
        graded(server.url, "a", request_timeout=0.2)


def test_a_budget_ends_the_asking_and_raised_it_goes_on_with_what_is_missing(graded: Any) -> None:
    with judging(by_length) as server:
        with pytest.raises(RewardError, match="budget of 3 requests is spent: raise budget_requests"):
            graded(server.url, *"abcde", budget_requests=3, concurrency=1)
        assert len(server.questions) == 3
        assert graded(server.url, *"abcde", budget_requests=5) == [0] * 5
        assert len(server.questions) == 5
        assert graded(server.url, *"abcde", budget_requests=1) == [0] * 5, "what is known costs nothing"


def test_tokens_have_a_budget_too_where_the_server_counts_them(graded: Any) -> None:
    with judging(by_length) as server:
        with pytest.raises(RewardError, match="budget of 200 tokens is spent"):
            graded(server.url, *"abcde", budget_tokens=200, concurrency=1)
        assert len(server.questions) == 2
    uncounted = {key: value for key, value in completed("Score: 10").items() if key != "usage"}
    with judging(lambda *_: (200, uncounted)) as server:
        assert graded(server.url, "x") == [1]
        with pytest.raises(RewardError, match="does not say how many tokens"):
            graded(server.url, "y", budget_tokens=10_000)
