"""The rehearsal of the rewards: what it reports of sound ones, and what makes it suspicious."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_core.config.files import parse_config
from grpo_core.errors import RewardError
from grpo_core.rewards.rehearsal import TRYING, first_rows, longest_seconds, rehearse
from tests.conftest import config_values, make_tokenizer
from tests.grpo_core.rewards.judging import judging

REWARDS = """
import time
def same(completions): return [0.5] * len(completions)
def never(completions): return [None] * len(completions)
def short(completions): return [1.0]
def nan(completions): return [float("nan")] * len(completions)
def parses(completions): return [float(c) for c in completions]
def hangs(completions):
    while True: pass
def ends(completions):
    import os; os._exit(3)
def compares(completions, answer): return [float(c == str(a)) for c, a in zip(completions, answer)]
def contains(completions, answer): return [float(str(a) in c) for c, a in zip(completions, answer)]
def tagged(completions, answer): return [float(c == f"<a>{a}</a>") for c, a in zip(completions, answer)]
def slow(completions):
    time.sleep(0.05)
    return [float(len(c)) for c in completions]
def counted(completion_ids):
    return [float(len(ids)) for ids in completion_ids]
def polite(completions): return [float("please" in c[-1]["content"]) for c in completions]
def talks(completions, prompts):
    return [float(len(c[-1]["content"] + p[-1]["content"])) for c, p in zip(completions, prompts)]
"""
ROWS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(10, 18)]


@pytest.fixture
def rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "rehearsed_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)

    def run(*rewards: dict[str, Any], rows: list[dict[str, Any]] = ROWS, **keys: Any) -> dict[str, Any]:
        values = {**config_values(tmp_path, tmp_path, **keys), "rewards": list(rewards)}
        return rehearse(parse_config(values), rows, make_tokenizer)

    return run


def test_the_right_answer_of_a_column_with_gaps_is_tried_as_people_write_it(rehearsed: Any) -> None:
    """A reward that compares it with the number's own text is found out."""
    rows = [{"prompt": f"{n}+1=", "answer": float(n + 1)} for n in range(10, 18)]
    report = rehearsed(
        {"function": "exact_match"}, {"function": "rehearsed_rewards:compares", "name": "own"}, rows=rows
    )
    assert [report["rewards"][name]["right"] for name in ("exact_match", "own")] == [1, 0]


def test_a_right_answer_an_empty_and_a_garbage_completion_are_scored(rehearsed: Any) -> None:
    report = rehearsed({"function": "numeric_match"}, {"function": "length", "args": {"target": 3}})
    numeric, length = (report["rewards"][name] for name in ("numeric_match", "length"))
    assert (numeric["right"], numeric["empty"], numeric["garbage"]) == (1.0, 0.0, 0.0)
    assert length["right"] == pytest.approx(2 / 3)  # two digits
    assert length["empty"] == 0.0
    assert (report["rows"], report["zero_or_one"], report["warnings"]) == (8, ["numeric_match"], [])


@pytest.mark.slow
def test_a_judge_whose_silence_would_pay_is_warned_of(rehearsed: Any, tmp_path: Path) -> None:
    with judging(lambda *_: "Score: 5") as server:
        arguments = {"model": "m", "base_url": server.url, "cache": str(tmp_path / "cache")}
        for weight, warned in ((-1.0, True), (1.0, False)):
            warnings = rehearsed({"function": "judge", "weight": weight, "args": arguments})["warnings"]
            assert any("'judge' has weight -1: what gets no grade counts as 0" in it for it in warnings) is warned


def test_a_reward_that_reads_token_ids_gets_them_and_others_cost_no_tokenizer(rehearsed: Any, tmp_path: Path) -> None:
    given = rehearsed({"function": "rehearsed_rewards:counted"})["rewards"]["counted"]
    assert (given["right"], given["empty"]) == (2.0, 0.0)
    values = config_values(tmp_path, tmp_path) | {"rewards": [{"function": "numeric_match"}]}
    rehearse(parse_config(values), ROWS, lambda: pytest.fail("the tokenizer was loaded"))


def test_without_answers_only_the_others_are_scored(rehearsed: Any) -> None:
    report = rehearsed({"function": "length", "args": {"target": 3}}, rows=[{"prompt": "1+1="}] * 3)
    assert set(report["rewards"]["length"]) == {"empty", "garbage", "seconds_per_completion"}


def test_a_reward_that_looks_for_text_in_messages_is_refused_with_the_cause(rehearsed: Any) -> None:
    asked = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    reward = {"function": "rehearsed_rewards:contains"}
    assert rehearsed(reward)["rewards"]["contains"]["right"] == 1
    with pytest.raises(RewardError, match="gives 0 to everything, because it reads completions as text: here they are"):
        rehearsed(reward, rows=asked)
    assert "gave 0 to the right" in rehearsed({"function": "rehearsed_rewards:polite"}, rows=asked)["warnings"][0]


def test_conversations_are_answered_by_a_message(rehearsed: Any) -> None:
    rows = [{"prompt": [{"role": "user", "content": "1+1="}]}]
    assert rehearsed({"function": "rehearsed_rewards:talks"}, rows=rows)["rewards"]["talks"]["empty"] == 4.0


@pytest.mark.parametrize(
    ("reward", "keys", "warning"),
    [
        (
            {"function": "rehearsed_rewards:same"},
            {},
            "'same' gave 0.5 to the right answer, an empty completion and garbage",
        ),
        (
            {"function": "rehearsed_rewards:tagged"},
            {},
            "gives 0 to the bare right answer of row 0 (and to 7 more of 8)",
        ),
        (
            {"function": "rehearsed_rewards:slow", "timeout": 0.2},
            {"per_device_train_batch_size": 400},
            "'slow' would take",
        ),
    ],
)
def test_what_looks_wrong_is_a_warning(
    rehearsed: Any, reward: dict[str, Any], keys: dict[str, Any], warning: str
) -> None:
    assert any(warning in found for found in rehearsed(reward, **keys)["warnings"])


# The first problem of GSM8K, whose answers are solutions.
SOLUTION = "48/2 = <<48/2=24>>24 clips in May.\n48+24 = <<48+24=72>>72 clips altogether in April and May.\n#### 72"


@pytest.mark.slow
def test_answers_that_a_reward_takes_for_none_are_shown(rehearsed: Any) -> None:
    rows = [{"prompt": "How many clips?", "answer": SOLUTION}] * 3
    shown = "it gave only None; row 0 has answer = '48/2 = <<48/2=24>>24 clips"
    numeric, length = {"function": "numeric_match"}, {"function": "length", "args": {"target": 3}}
    (warning,) = rehearsed(numeric, length, rows=rows)["warnings"]
    assert f"'numeric_match' applies to none of the rehearsed completions: {shown}" in warning
    with pytest.raises(RewardError, match="no reward applies to the right answer of any of the first 3 rows") as error:
        rehearsed(numeric, rows=rows)
    assert shown in str(error.value)
    assert rehearsed({"function": "math_answer"}, rows=rows)["rewards"]["math_answer"]["right"] == 1


RIGHT = {"function": "numeric_match"}  # 0 to 1
OVERLONG = {"function": "soft_overlong_punishment", "args": {"max_completion_len": 4, "soft_punish_cache": 2}}


@pytest.mark.parametrize(("threshold", "when"), [(1.5, "never"), (0.0, "always")])
def test_a_gate_that_says_nothing_is_refused(rehearsed: Any, threshold: float, when: str) -> None:
    gated = {"function": "length", "args": {"target": 3}, "gate": "numeric_match", "gate_threshold": threshold}
    with pytest.raises(
        RewardError, match=f"'length' counts where 'numeric_match' gives {threshold:g} or more, .*{when}"
    ):
        rehearsed(RIGHT, gated)


@pytest.mark.parametrize(
    ("change", "paying"),
    [({}, True), ({"weight": -1.0}, False), ({"clip": [-1.0, 0.0], "normalize": True}, False), ({"gate": None}, False)],
)
def test_a_punishment_that_a_closed_gate_spares_is_a_warning(
    rehearsed: Any, change: dict[str, Any], paying: bool
) -> None:
    warnings = rehearsed(RIGHT, {**OVERLONG, "gate": "numeric_match", **change})["warnings"]
    assert any("adds -1 at the least, and 0 where its gate" in warning for warning in warnings) == paying


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"function": "rehearsed_rewards:same", "range": [-1.0, 0.0]}, r"returned 0.5 .* its range is -1 to 0"),
        ({"function": "rehearsed_rewards:short"}, r"returned 1 values for 24 completions"),
        ({"function": "rehearsed_rewards:nan"}, r"returned nan for prompt"),
        ({"function": "rehearsed_rewards:parses"}, r"raised ValueError: .* for prompt '10\+1=', completion ''"),
        ({"function": "rehearsed_rewards:hangs", "timeout": 0.5}, r"did not come back within 0.5 s"),
    ],
)
def test_what_breaks_the_reward_contract_is_refused(rehearsed: Any, reward: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        rehearsed(reward)


@pytest.mark.slow
def test_an_isolated_reward_that_ends_its_process_is_a_finding_beside_the_others(
    rehearsed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ending = {"function": "rehearsed_rewards:ends", "isolated": True}
    short = {"function": "rehearsed_rewards:short"}
    with pytest.raises(RewardError) as error:
        rehearsed(ending, RIGHT, short)
    first, second = str(error.value).splitlines()
    assert "'ends' lost its process, which ended with exit status 3, for prompt '10+1=', completion '11'" in first
    assert "'short' returned 1 values for 24 completions" in second
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(TRYING)]
    assert said == [f"{TRYING}reward {name!r}" for name in ("ends", "numeric_match", "short")]


def test_the_longest_rehearsal_allows_each_reward_its_time_limits(tmp_path: Path) -> None:
    rewards = [
        {"function": "numeric_match", "timeout": 5.0},
        {"function": "judge", "timeout": 500.0, "args": {"model": "m", "base_url": "http://127.0.0.1:1/v1"}},
        {"function": "length", "args": {"target": 3}, "isolated": True},
    ]
    config = parse_config({**config_values(tmp_path, tmp_path), "rewards": rewards})
    calls = 2 * (4 * (5 + 1)) + 2 * (4 * (500 + 1)) + 2 * (60 + 1 + 3 * (20 + 1))
    assert longest_seconds(config) == 600 + calls + 4 * 300


def test_it_tries_the_first_rows_of_each_source_wherever_they_stand(tmp_path: Path) -> None:
    names = ["late", "early", "short"]
    of_rows = ["early"] * 3000 + ["short", "late", "short"] + ["late"] * 9
    rows = [{"n": n, "source": source} for n, source in enumerate(of_rows)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet", row_group_size=700)
    values = config_values(tmp_path, tmp_path)
    values["data"] = {"sources": [{"name": name, **values["data"]} for name in names]}
    found = first_rows(parse_config(values), tmp_path / "train.parquet", 8)  # 3 of each, if it has as many
    assert found == [row for name in names for row in [it for it in rows if it["source"] == name][:3]]
