"""Built-in rewards on hard cases, and the contract that every reward function is held to."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from grpo_core.rewards import RewardError, resolve, score
from grpo_core.rewards.builtin import exact_match, format_regex, length, numeric_match
from grpo_core.sections import RewardConfig


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("46", "46", 1),
        ("The sum is 46.", "46", 1),
        ("first 45, then 46", 46, 1),
        ("46 or 47", "46", 0),
        ("1,234,567", "1234567", 1),
        ("-3", "-3", 1),
        ("3", "-3", 0),
        ("46.0", "46", 1),
        (".5", "0.50", 1),
        ("1e3", "1000", 1),
        (".5e1 is 5", "5", 1),
        (".5e1", "5", 1),
        ("-0.0", "0", 1),
        ("12,34", "34", 1),
        ("0.1", "0.10000000000000001", 0),
        ("9" * 400, "46", 0),
        ("1e9999999", "46", 0),
        ("1e99999999999999999999", "46", 0),
        ("-1e-9999999", "46", 0),
        ("46", "1e9999999", 0),
        ("46", "1,000", 0),
        ("1000", "1,000", 1),
        ("146", "46", 0),
        ("", "46", 0),
        ("none", "46", 0),
        ("46", None, None),
        ("46", "not a number", None),
        ("46", "nan", None),
    ],
)
def test_numeric_match_compares_the_last_number(completion: str, answer: Any, reward: float | None) -> None:
    assert numeric_match([completion], [answer]) == [reward]


def test_numeric_match_allows_the_given_tolerance() -> None:
    assert numeric_match(["3.14", "3.2"], ["3.1415", "3.1415"], tolerance=0.01) == [1, 0]


def test_exact_match_ignores_white_space_around_only() -> None:
    assert exact_match([" yes\n", "y es", "Yes", "yes"], ["yes", "yes", "yes", None]) == [1, 0, 0, None]


def test_format_regex_wants_the_whole_completion_over_several_lines() -> None:
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    completions = [
        "<think>a\nb</think>\n<answer>1</answer>",
        "x <think></think><answer></answer>",
        "<answer>1</answer>",
    ]
    assert format_regex(completions, pattern) == [1, 0, 0]


def test_length_peaks_at_its_target_and_never_goes_below_zero() -> None:
    assert length([[0] * n for n in (0, 5, 10, 15, 20, 40)], target=10) == [0, 0.5, 1, 0.5, 0, 0]


def test_conversations_are_scored_by_their_last_message() -> None:
    assert numeric_match([[{"role": "assistant", "content": "46"}]], ["46"]) == [1]


ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]


def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> RewardConfig:
    name = f"rewards_{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    return RewardConfig(function=f"{name}:f")


def test_a_function_gets_the_rollout_the_columns_and_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = "def f(prompts, completions, completion_ids, answer, bonus, **columns):\n"
    body += "    assert (prompts, completion_ids) == (['1+1=', '2+2='], [[1], [2]])\n"
    body += "    return [bonus * (c == a) for c, a in zip(completions, answer)]\n"
    config = _module(tmp_path, monkeypatch, body).model_copy(update={"args": {"bonus": 3}})
    reward = resolve(config)
    assert reward.columns == ("answer",)
    assert score(reward, ROWS, ["2", "5"], [[1], [2]]) == [3, 0]


def test_none_means_not_scored() -> None:
    values = score(resolve(RewardConfig(function="exact_match")), [{**ROWS[0], "answer": None}], ["2"], [[1]])
    assert math.isnan(values[0])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def f(completions): return [1.0]", "returned 1 values for 2 completions"),
        ("def f(completions): return None", "returned NoneType"),
        ("def f(completions): return [1.0, float('nan')]", "returned nan for prompt '2\\+2=', completion 'b'"),
        ("def f(completions): return [float('inf'), 0.0]", "returned inf for prompt '1\\+1='"),
        ("def f(completions): raise KeyError('x')", "raised KeyError: 'x'"),
        ("def f(completions): return ['1', '0']", "returned '1' for prompt '1\\+1='"),
        ("def f(completions): return [0, [1]]", "returned \\[1\\] for prompt '2\\+2=', completion 'b'"),
        ("def f(completions): return [10**400, 0]", "returned 1000"),
        ("def f(completions, bonus): return [0, 0]", "raised TypeError: .*missing .* 'bonus'"),
    ],
)
def test_a_broken_contract_is_reported_with_the_functions_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    reward = resolve(_module(tmp_path, monkeypatch, body))
    with pytest.raises(RewardError, match=f"reward 'f' {message}"):
        score(reward, ROWS, ["a", "b"], [[1], [2]])


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        ("exact_mach", {}, "there are exact_match, numeric_match"),
        ("no_such_package.module:f", {}, "cannot be imported"),
        ("math:no_such_function", {}, "cannot be imported"),
        ("math:pi", {}, "is a float, not a function"),
        ("length", {"goal": 3}, "takes no argument \\['goal'\\]"),
    ],
)
def test_an_unusable_reward_is_refused_when_it_is_resolved(function: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        resolve(RewardConfig(function=function, args=args))
