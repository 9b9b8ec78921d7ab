"""A script in TRL's form is used as it is: its environment, its tools, its reward functions."""

from __future__ import annotations

import math
from typing import Any

import pytest

from grpo_core.config.environment import EnvironmentConfig
from grpo_core.config.inputs import RewardConfig
from grpo_core.data.prompts import Prompts
from grpo_core.environments.processes import Environments
from grpo_core.environments.setting import Setting
from grpo_core.rewards.contract import resolve_here
from grpo_core.rollout.collect import Sample, Scoring, sample_and_score
from grpo_core.rollout.types import Request, Sampling
from tests.grpo_core.environments.scripted import Scripted, call, turns

pytestmark = pytest.mark.served
HERE = "tests.grpo_core.environments.trl_script"
FORMAT = turns()
WON = [
    call("guess", '{"word": "slate"}') + call("hint", '{"position": 0, "case": "upper", "prefix": "a "}'),
    call("guess", '{"word": "cranes"}') + call("left") + call("letters"),
    call("guess", '{"word": "crane"}') + call("guess", '{"word": "crane"}'),
    "It is crane.",
]
TOOLS = [call("multiply", '{"a": 1.5, "b": 4}') + call("later", '{"text": "hi"}'), "6"]


def _play(config: dict[str, Any], scripts: list[list[str]], rewards: list[str], rows: list[dict[str, Any]]) -> Any:
    environments = Environments(EnvironmentConfig(**config, tool_timeout=60.0))
    try:
        data = [{"prompt": [{"role": "user", "content": f"#{i}"}], **row} for i, row in enumerate(rows)]
        setting = Setting(environments, FORMAT)
        prompts = Prompts(data, [setting.encode(row) for row in data], 0)
        requests = [Request(ids, 1, 0, 4000, row=row) for row, ids in enumerate(prompts.ids)]
        functions = [
            resolve_here(RewardConfig(name=str(i), function=name, weight=1.0)) for i, name in enumerate(rewards)
        ]
        samples, _ = sample_and_score(
            Scripted(scripts, FORMAT), requests, Sampling(4000), prompts,
            Scoring(FORMAT.tokenizer, functions, setting),
        )  # fmt: skip
        return samples, environments
    finally:
        environments.close()


def _answers(sample: Sample) -> list[str]:
    assert sample.said is not None and sample.said.failure == ""
    return [message["content"] for message in sample.said.messages if message["role"] == "tool"]


def test_an_environment_and_its_reward_functions_are_used_as_they_are() -> None:
    rewards = [f"{HERE}:{name}" for name in ("reward_func", "brevity_reward", "tool_reward")]
    config = {"environment_factory": f"{HERE}:WordEnv", "tools": [f"{HERE}:multiply"]}
    (won, silent), environments = _play(config, [WON, ["No."]], rewards, [{"word": "crane"}, {"word": "spoon"}])
    assert FORMAT.tokenizer.decode(won.prompt_ids).endswith(
        "#0\nThe word has 5 letters.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert _answers(won) == [
        "XXGXG",
        "a C",
        "Error: ValueError: The word must have 5 letters.",
        "5",
        "['a', 'e', 'l', 's', 't']",
        "GGGGG",
        "Error: ValueError: Game over.",
    ]
    assert won.rewards == [0.5, 0.0, 7.0] and silent.rewards == [0.0, 0.0, 0.0]
    tools = environments.tools("")
    assert list(tools) == ["multiply", "guess", "hint", "left", "letters"]
    hint = tools["hint"]["function"]["parameters"]
    assert hint["required"] == ["position"] and hint["properties"]["case"]["enum"] == ["lower", "upper"]
    assert not environments.has_reward("")


def test_tools_alone_and_several_environments_by_name() -> None:
    (alone,), _ = _play({"tools": [f"{HERE}:multiply", f"{HERE}:later"]}, [TOOLS], [f"{HERE}:tool_reward"], [{}])
    assert _answers(alone) == ["6.0", "{'said': 'hi'}"] and alone.rewards == [2.0]
    (mixed, other), environments = _play(
        {
            "environment_factory": {"words": f"{HERE}:make_env", "plain": f"{HERE}:WordEnv"},
            "environment_args": {"words": {"most_guesses": 9}},
        },
        [WON, ["No."]],
        ["environment"],
        [{"word": "crane", "environment": "words"}, {"word": "crane", "environment": "plain"}],
    )
    assert environments.has_reward("words") and not environments.has_reward("plain")
    assert _answers(mixed)[3] == "8"
    assert mixed.rewards == [0.5] and math.isnan(other.rewards[0])  # None: it has no reward
