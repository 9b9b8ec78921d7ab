"""The recipes for texts: what their small data says is so, what the base learns from is as mixed as it claims, and the
judge is asked in training what it was taught; and what the examples have Prefect's server send is JSON with the texts
in it, whatever these contain. Their training is exercised by tests/e2e/test_recipes.py."""

from __future__ import annotations

import asyncio
import json
import random
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.server.utilities.user_templates import register_user_template_filters, render_user_template_sync

from examples import tiny
from examples.dialogue import make as dialogue
from examples.dialogue import ultrafeedback
from examples.notifications.webhook import FAILED, FROM_EVENT
from examples.summaries import make as summaries
from examples.summaries import tldr
from examples.writing import make as writing
from examples.writing import writingprompts
from grpo_core.rewards.builtin.judge import judge
from grpo_core.rewards.builtin.rouge import rouge
from grpo_core.rewards.builtin.variety import distinct_n, self_repetition
from tests.web import Quiet, answering

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("make_rows", [summaries.make_rows, dialogue.make_rows, writing.make_rows])
def test_no_held_out_prompt_is_a_training_prompt_and_the_seed_says_which(make_rows: Callable[..., Any]) -> None:
    train, held = make_rows()
    prompts = [json.dumps(row["prompt"]) for row in train + held]
    assert len(set(prompts)) == len(train) + len(held)
    assert (train, held) == make_rows(tiny.SEED) != make_rows(tiny.SEED + 1)


@pytest.mark.slow
def test_a_summary_says_what_its_post_says_and_nothing_else_scores_as_high() -> None:
    rng = random.Random(0)
    rows = summaries.make_rows()[0][:500]
    for row in rows:
        happened, whether = re.fullmatch(r" (My \w+ \w+ my \w+), should I (.*)\?", row["reference"]).groups()
        assert f"{happened}." in row["prompt"] and f"Should I {whether}?" in row["prompt"]
    said = [summaries.demonstrate(row, rng) for row in rows]
    scores = rouge(said, [row["reference"] for row in rows])
    right = [text == row["reference"] for text, row in zip(said, rows, strict=True)]
    assert {score == 1 for score, as_asked in zip(scores, right, strict=True) if as_asked} == {True}
    assert max(score for score, as_asked in zip(scores, right, strict=True) if not as_asked) < 0.8
    assert mean(right) == pytest.approx(summaries.SUMMED_UP, abs=0.07)


def test_a_helpful_answer_is_about_what_was_asked_and_said_to_who_asked() -> None:
    rng = random.Random(0)
    for row in dialogue.make_rows()[0][:300]:
        system, *turns = row["prompt"]
        assert system["role"] == "system" and [turn["role"] for turn in turns[::-1]][::2] == ["user"] * (
            len(turns) // 2 + 1
        )
        answer, worse = dialogue.helpful(row), dialogue.unhelpful(row, rng)
        (topic,) = (topic for topic in dialogue.HELP if topic in turns[-1]["content"])
        assert dialogue.HELP[topic] in answer and row["name"] in answer
        assert any(f"I am {row['name']}." in turn["content"] for turn in turns)
        assert worse != answer and answer not in worse


def test_what_a_story_lacks_costs_a_point_each() -> None:
    begin, (one, two), end = writing.BEGINNINGS[1], writing.EVENTS[1:3], writing.ENDS[1]
    deserved = {
        (begin, one, two, end): 5,
        (begin, one, end): 4,
        (begin, one, one, end): 4,
        (begin, one): 3,
        (one, end): 3,
        (end, one, begin): 2,
        (begin,): 2,
        (one, one, one): 2,
        (end, begin): 1,
    }
    assert {sentences: writing.grade(sentences) for sentences in deserved} == deserved
    rng = random.Random(0)
    assert {writing.grade(writing.anything(rng)) for _ in range(5000)} == {*range(1, 6)}


def test_the_other_rewards_tell_the_favourite_story_and_empty_talk_from_stories_of_their_own() -> None:
    rng = random.Random(0)
    row = writing.make_rows()[0][0]
    told = [writing.say(writing.tell(rng), row) for _ in range(1000)]
    favourite, times = Counter(told).most_common(1)[0]
    assert times / len(told) == pytest.approx(writing.FAVOURITE, abs=0.05)
    own = [writing.say([begin, *writing.EVENTS[:2], end], row) for begin in writing.BEGINNINGS for end in writing.ENDS]
    same_prompt = [row["prompt"]] * 4
    assert set(self_repetition(same_prompt, [favourite] * 4)) == {-1}
    assert mean(self_repetition(same_prompt, list(dict.fromkeys(told))[:4])) > -0.5
    assert min(distinct_n(own)) > 0.85
    assert max(distinct_n([f"{event} {event} {event}" for event in writing.EVENTS])) < 0.5


@pytest.fixture
def asked() -> Iterator[tuple[str, list[str]]]:
    """A judge that grades everything 4: its address, and what it was asked."""
    questions: list[str] = []

    class Judge(Quiet):
        def do_POST(self) -> None:
            questions.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"])
            choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Score: 4"}}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "judge", "choices": [choice]}
            body = json.dumps({**answer, "usage": usage}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with answering(Judge) as url:
        yield f"{url}/v1", questions


@pytest.mark.slow
def test_the_small_judge_is_taught_what_the_configuration_asks_it(asked: tuple[str, list[str]], tmp_path: Path) -> None:
    base_url, questions = asked
    config = tomllib.loads((ROOT / "configs" / "writing.toml").read_text())
    (args,) = (reward["args"] for reward in config["rewards"] if reward["function"] == "judge")
    args = {**args, "base_url": base_url, "cache": str(tmp_path)}
    assert asyncio.run(judge(["Write."], ["A fox. The end."], **args)) == [0.75]
    unmarked = [
        re.sub(r"\[\[[0-9a-f]{16}\]\]", "MARK", text)
        for text in (*questions, writing.question("A fox. The end.", random.Random(0)))
    ]
    assert len(unmarked) == 2 and unmarked[0] == unmarked[1]


def test_real_data_becomes_rows_of_the_same_kind() -> None:
    assert tldr.make_row({"prompt": "POST: …\nTL;DR:", "completion": " short"}) == {
        "prompt": "POST: …\nTL;DR:",
        "reference": " short",
    }
    question = {"role": "user", "content": "Why is the sky blue?"}
    assert ultrafeedback.make_row({"prompt": [question]}) == {
        "prompt": [{"role": "system", "content": dialogue.SYSTEM}, question]
    }
    (message,) = writingprompts.make_row("[ WP ] A lamp is lost .")["prompt"]
    assert message["role"] == "user" and message["content"].endswith("words. A lamp is lost .")


HOSTILE = 'x", "channel": "#ops", "y": "\n\\ {{ 1 }} </script>'


@pytest.mark.slow
def test_a_name_or_a_text_does_not_break_out_of_a_notification() -> None:
    register_user_template_filters({"ui_url": lambda run: f"https://prefect.internal/{run.id}"})
    run = SimpleNamespace(id=1, name=HOSTILE, state=SimpleNamespace(name="Failed"))
    context = {"flow": SimpleNamespace(name="pipeline"), "flow_run": run}
    said = f"pipeline: run {HOSTILE} is Failed. https://prefect.internal/1"
    assert json.loads(render_user_template_sync(FAILED, context)) == {"text": said}
    event = SimpleNamespace(payload={"text": HOSTILE})
    assert json.loads(render_user_template_sync(FROM_EVENT, {"event": event})) == {"text": HOSTILE}
