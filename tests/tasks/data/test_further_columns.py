"""Columns beside the prompts: those that the signatures of rewards ask for, evaluation.group_column, and in
conversations with tools and environments the column environment, messages of tools, rows that are compared whole and
lengths with the tools in the prompt."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from grpo_core.config.environment import EnvironmentConfig
from grpo_core.config.files import parse_config
from grpo_core.system.tables import read_parquet
from tasks.data.contract import Part, check
from tasks.data.groups import count_groups, group_problems
from tasks.data.lengths import sample_lengths
from tasks.data.repeats import NONE
from tasks.data.rows import of_frame
from tasks.validate import too_few_groups, too_few_to_promote
from tests.conftest import config_values, write_sums
from tests.grpo_core.environments.scripted import TEMPLATE
from tests.grpo_core.environments.templates import CHATML, make_tokenizer
from tests.rows import screen

REWARDS = """
from collections.abc import Sequence
from functools import partial
from typing import Optional
def untyped(completions, fact): ...
def text(completions, fact: list[str]): ...
def number(completions, fact: list[float]): ...
def whole(completions, fact: list[int]): ...
def flag(completions, fact: list[bool]): ...
def lists(completions, fact: list[list[str]]): ...
def gaps(completions, fact: list[str | None]): ...
def maybe(completions, fact: Optional[tuple[str, ...]], n: "Unknown" = 0): ...
class Grader:
    def __call__(self, completions, fact: "Sequence[str]"): ...
called = Grader()
part = partial(text)
def none(completions, fact=None, **columns): ...
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "accepted_by"),
    [
        (["a", "b"], {"untyped", "text", "gaps", "none", "maybe", "called", "part"}),
        ([1.5, 2.5], {"untyped", "number", "none"}),
        ([1, 2], {"untyped", "number", "whole", "none"}),
        ([True, False], {"untyped", "flag", "none"}),
        ([["a"], ["b"]], {"untyped", "lists", "none"}),
        (["a", None], {"gaps", "none"}),
        ([1.5, float("nan")], {"none"}),
        (None, {"none"}),
    ],
)
def test_what_a_column_must_hold_follows_from_the_rewards_signatures(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[Any] | None, accepted_by: set[str]
) -> None:
    (tmp_path / "signatures.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    for name, prompts in {"train": ["1", "2"], "eval": ["3", "4"]}.items():
        columns = {"prompt": prompts} | ({} if values is None else {"fact": values})
        pl.DataFrame(columns).write_parquet(tmp_path / f"{name}.parquet")
    accepted = set()
    names = ("untyped", "text", "number", "whole", "flag", "lists", "gaps", "none", "maybe", "called", "part")
    for reward in names:
        configured = {**config_values(model_folder, tmp_path), "rewards": [{"function": f"signatures:{reward}"}]}
        if not screen(parse_config(configured)).refused:
            accepted.add(reward)
    assert accepted == accepted_by


PROMPTS = ["1=", "2=", "3=", "1="]


def problems(**columns: list[Any]) -> list[str]:
    rows = of_frame(pl.DataFrame({"prompt": PROMPTS, **columns}))
    parts = {"train": rows.where(pl.Series([True] * 4)), "eval": rows}
    return [*group_problems("passage", {name: Part(its) for name, its in parts.items()}, parts, False)]


def test_prompts_without_a_group_and_equal_ones_of_several_are_refused() -> None:
    assert problems(passage=["a", "b", "b", "a"]) == []
    assert problems(passge=[1, 2, 3, 4]) == [
        "eval has no column 'passage', which evaluation.group_column names; its columns are prompt, passge: set "
        'data.columns.passage = "passge"'
    ]
    for values in (["a", None, " ", "a"], [1.0, None, float("nan"), 1.0]):
        assert problems(passage=values) == [
            "eval: 2 of 4 prompts have no value in the column 'passage', which evaluation.group_column names; the "
            "first is row 1 of those kept. Give each prompt a group, if need be one of its own"
        ]
    assert problems(passage=["a", "b", "b", "c"]) == [
        "eval: 1 prompts are in several groups by the column 'passage', such as '1='; give equal prompts the same group"
    ]


def test_groups_are_counted_by_part_and_in_all() -> None:
    frames = {"train/a": [1], "eval/a": [1, 2, 2], "eval/b": [2, 3], "eval-hard": [4]}
    parts = {name: of_frame(pl.DataFrame({"passage": values})) for name, values in frames.items()}
    assert count_groups("passage", parts) == {"eval/a": 2, "eval": 3, "eval/b": 2, "eval-hard": 1}


@pytest.mark.slow
def test_validate_says_how_many_groups_there_are_and_warns_of_few(model_folder: Path, tmp_path: Path) -> None:
    write_sums(tmp_path / "train.parquet", 10, 34)
    path = write_sums(tmp_path / "eval.parquet", 60, 76)
    values = {**config_values(model_folder, tmp_path), "evaluation": {"group_column": "passage"}}
    assert "eval has no column 'passage'" in screen(parse_config(values)).shape[0]
    read_parquet(path).with_columns(passage=pl.int_range(16) // 4).write_parquet(path)
    config = parse_config(values)
    screened = screen(config)
    assert (screened.refused, screened.report["num_groups"]) == (False, {"eval": 4})
    [warning] = too_few_groups(config, screened.report)
    assert warning.startswith("held-out: 16 prompts are 4 groups (evaluation.group_column = 'passage')")
    assert too_few_groups(config, {**screened.report, "num_groups": {"eval": 50}}) == []
    assert too_few_groups(config, {**screened.report, "num_groups": {}}) == []
    graded = parse_config({**values, "rewards": [{"function": "char_length"}]})
    [warning] = too_few_to_promote(graded, "reward", {"held-out": 4})
    assert "with 4 groups in 'held-out' none can be promoted. Hold out 200 groups" in warning


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
