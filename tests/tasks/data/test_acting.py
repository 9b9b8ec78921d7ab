"""The data contract of conversations with tools and environments: messages of tools, the column `environment`, rows
that are compared whole, and lengths with the tools in the prompt."""

from __future__ import annotations

import random
from typing import Any

import polars as pl
import pytest

from grpo_core.config.environment import EnvironmentConfig
from tasks.data.contract import Part, check
from tasks.data.lengths import sample_lengths
from tasks.data.repeats import NONE
from tasks.data.rows import of_frame
from tests.grpo_core.environments.scripted import TEMPLATE
from tests.grpo_core.environments.templates import CHATML, make_tokenizer

LISTED = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{{ mood or '' }}"
TOKENIZER = make_tokenizer(LISTED + TEMPLATE, CHATML, "<|im_end|>")
USER = {"role": "user", "content": "2*3?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "calculator", "arguments": {"expression": "2*3"}}}],
}
ANSWER = {"role": "tool", "name": "calculator", "content": "6"}
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"properties": {}}}}
TWO = EnvironmentConfig(environment_factory={"maze": "m:Maze", "chess": "m:Chess"})
ONE = EnvironmentConfig(environment_factory="m:Maze")
TOOLS = EnvironmentConfig(tools=["calculator"])

Row = dict[str, Any]


def _check(
    train: list[Row],
    environment: EnvironmentConfig = TOOLS,
    room: int | None = None,
    evaluated: list[Row] | None = None,
) -> tuple[list[str], list[tuple[str, int, str]]]:
    """What is wrong with the shape, and the rules that rows break."""
    frames = {"train": pl.DataFrame(train), "eval": pl.DataFrame(evaluated or [{**train[0], "seed": -1}])}
    options = {name: {"tools": [TOOL]} for name in environment.factories or [""]}
    parts = {name: Part(of_frame(frame), room=room) for name, frame in frames.items()}
    shape, found = check(parts, TOKENIZER, [], environment, options, NONE)
    return shape, [row for row in found.select("dataset", "row", "check").rows() if row[0] == "train"]


def _numbered(prompts: list[list[Row]]) -> list[Row]:
    return [{"prompt": prompt, "seed": seed} for seed, prompt in enumerate(prompts)]


def test_a_conversation_may_hold_calls_and_end_with_what_a_tool_said() -> None:
    assert _check(_numbered([[USER, CALL, ANSWER], [USER], [USER, CALL, ANSWER, USER]]), ONE) == ([], [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("messages", "rule"),
    [
        ([USER, CALL], "blank_prompt"),  # nothing to answer
        ([USER, {**CALL, "tool_calls": None}, USER], "malformed_conversation"),  # says nothing
        ([USER, {**CALL, "tool_calls": []}, USER], "malformed_conversation"),
        ([USER, CALL, {**ANSWER, "role": "function"}], "malformed_conversation"),
        ([USER, CALL, {**ANSWER, "content": ""}], "blank_prompt"),
        ([USER, CALL, {**ANSWER, "content": "6" * 500}], "long_prompt"),
    ],
)
def test_a_fault_of_a_conversation_with_calls_is_found(messages: list[Row], rule: str) -> None:
    sound = [USER, CALL, ANSWER]
    assert _check(_numbered([sound, messages, sound]), ONE, room=500) == ([], [("train", 1, rule)])


def test_rows_that_no_conversation_can_begin_with_are_named() -> None:
    rows = [{"prompt": [USER], "environment": name, "seed": seed} for seed, name in enumerate(("maze", "go", None))]
    assert _check([{"prompt": "2*3?"}])[0] == [
        f"the prompts of {name} are text; tools and environments need messages, such as "
        '[{"role": "user", "content": …}]: data.system_prompt = "" makes messages of text'
        for name in ("train", "eval")
    ]
    assert _check(_numbered([[USER]]), TWO)[0][0] == (
        "train has no text column 'environment', which names the environment of each row: maze, chess "
        "(environment.environment_factory)"
    )
    assert _check(rows, TWO)[0] == [
        "train row 1, column 'environment': 'go', and 1 more rows like it; environment.environment_factory names maze, "
        "chess"
    ]
    assert _check(rows, ONE) == ([], [])  # a column like any other


def test_with_an_environment_rows_are_compared_whole_and_without_one_their_prompts() -> None:
    rows = _numbered([[USER], [USER]])
    assert _check([*rows, rows[0]], ONE)[1] == [("train", 2, "duplicate_prompt")]
    assert _check(rows, ONE, evaluated=[{"prompt": [USER], "seed": 1}])[1] == [("train", 1, "overlap")]
    assert {check for _, _, check in _check(rows, TOOLS)[1]} == {"duplicate_prompt", "overlap"}


def test_lengths_are_those_of_each_row_s_own_tools_and_variables() -> None:
    options = {"a": {"tools": [TOOL] * 2, "mood": "sad"}, "b": {"tools": None}, "c": {"tools": [TOOL]}}
    environment, draw = EnvironmentConfig(environment_factory=dict.fromkeys(options, "m:E")), random.Random(0)
    data = [
        {
            "prompt": [*draw.choices([USER, CALL, ANSWER], k=draw.randrange(4)), USER],
            "environment": draw.choice([*options]),
            "seed": seed,
        }
        for seed in range(60)
    ]
    plain = [
        len(
            TOKENIZER.apply_chat_template(
                [{key: value for key, value in message.items() if value is not None} for message in row["prompt"]],
                add_generation_prompt=True,
                return_dict=True,
                **options[row["environment"]],
            )["input_ids"]
        )
        for row in data
    ]
    frame, room = pl.DataFrame(data), sorted(plain)[30]
    assert sample_lengths(of_frame(frame), TOKENIZER, options).to_list() == plain
    parts = {name: Part(of_frame(each), room=room) for name, each in {"train": frame, "eval": frame.head(1)}.items()}
    _, found = check(parts, TOKENIZER, [], environment, options, NONE)
    long = found.filter(check="long_prompt", dataset="train")["row"].to_list()
    assert sorted(long) == [row for row, length in enumerate(plain) if length > room] != []
