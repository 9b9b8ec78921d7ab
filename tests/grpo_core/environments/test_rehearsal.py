"""The rehearsal of environments and tools: what it reports of sound ones, and what it finds wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from grpo_core.config.files import parse_config
from grpo_core.environments import rehearsal
from grpo_core.environments.registry import EnvironmentsError
from grpo_core.environments.rehearsal import arguments_for, longest_seconds, rehearse
from tests.grpo_core.environments import scripted

pytestmark = pytest.mark.served

HERE = "tests.grpo_core.environments.faulty"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scripted.save_model(tmp_path_factory.mktemp("talking"))


@pytest.fixture
def rehearsed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rehearse two rows of each of these classes."""

    def run(
        *names: str, reward: dict[str, Any] | None = None, model: Path = model, **environment: Any
    ) -> dict[str, Any]:
        """Without names: tools alone."""
        factories = {name: f"{HERE}:{name}" for name in names} or None
        values = {
            "name": "tried",
            "model": {"name_or_path": str(model)},
            "data": {"train": "train.parquet", "eval": "eval.parquet"},
            "rewards": [reward or {"function": "environment"}],
            "environment": {"tool_timeout": 2.0, "environment_factory": factories, **environment},
            "rollout": {"max_completion_length": 400},
        }
        prompt = [{"role": "user", "content": "#0"}]
        rows = [{"prompt": prompt, "answer": "1", "environment": name} for name in [*(names or "x")] * 3]
        pl.DataFrame(rows).write_parquet(tmp_path / "train.parquet")
        monkeypatch.setattr(rehearsal, "ROWS", 2 * max(len(names), 1))
        return rehearse(parse_config(values), tmp_path / "train.parquet")

    return run


def test_a_sound_environment_is_measured_and_its_rewards_too(rehearsed: Any) -> None:
    report = rehearsed("Sound", reward={"function": f"{HERE}:told"}, tools=["calculator"])
    found = report["environments"]["Sound"]
    assert (found["rows"], [*found["tools"]]) == (2, ["calculator", "tell"])
    assert found["tools"]["tell"]["tokens"] > found["reset"]["tokens"] > 0 == found["tools"]["calculator"]["raised"]
    assert report["rewards"]["told"]["garbage"] == len("told 2")
    assert report["warnings"] == [
        "Sound has a method get_reward, and what it gives does not count: no reward is called 'environment'"
    ]


BROKEN = {
    "RaisesInReset": "reset, with row 0: KeyError: 'board'",
    "ReturnsNumber": "reset, with row 1: TypeError: reset returned int; return text or None",
    "Hangs": "tool tell(number=1): its time was up (environment.tool_timeout = 2 s)",
    "Ends": "tool tell(): its process ended",
    "NoText": "tool tell(): TypeError: the tool returned object, which is no text",
    "NoNumber": "get_reward, with row 5: it returned 'much'; return a finite number",
    "Talks": "nothing is left for the policy",
}


def test_all_that_would_end_conversations_is_refused_in_a_sentence_each(rehearsed: Any) -> None:
    with pytest.raises(EnvironmentsError) as error:
        rehearsed(*BROKEN)
    sentences = str(error.value).splitlines()
    for sentence, (name, problem) in zip(sentences, BROKEN.items(), strict=True):
        assert sentence.startswith(f"{name}: ") and problem in sentence


DOUBTED = {
    "Carries": "reset gave two texts for row 5 and the same seed, ' 2' and ' 1'",
    "Hashes": "reset gave two texts for row 6 and the same seed",
    "Answers": "the tool 'tell' returns up to",
    "Refuses": "tool tell(number=1): ValueError: a number from 2 to 9. All 2 calls raised",
    "Slow": "reset takes 0.",
}


def test_what_looks_wrong_is_warned_of(rehearsed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "SLOW", 0.09)
    report = rehearsed(*DOUBTED)
    # A busy machine makes others slow too.
    found = [it for it in report["warnings"] if " takes " not in it or it.startswith("Slow: reset takes")]
    for warning, (name, problem) in zip(found, DOUBTED.items(), strict=True):
        assert warning.startswith(f"{name}: {problem}")
    assert report["environments"]["Refuses"]["tools"]["tell"]["seconds"] > 0


def test_what_the_policy_is_told_too_little_of_is_warned_of(rehearsed: Any) -> None:
    none, side, others = rehearsed("Silent", "Vague")["warnings"]
    assert none.startswith("Silent: it has no tools, so each conversation ends after one turn")
    for warning, argument in ((side, "side"), (others, "others")):
        assert warning.startswith(f"Vague: the policy is told that the argument {argument!r} of the tool 'go' is an ")
    with pytest.raises(EnvironmentsError, match=r"the tool 'go' takes '\*\*kwargs: .*int.*', and the policy gives"):
        rehearsed("Starred")


def test_a_tool_without_environment_that_hangs_is_refused(rehearsed: Any) -> None:
    playing = "tests.grpo_core.environments.playing"
    with pytest.raises(EnvironmentsError) as error:
        rehearsed(tools=["calculator", f"{playing}:hang"], tool_timeout=0.5, reward={"function": "numeric_match"})
    assert str(error.value) == "tools: tool hang(): its time was up (environment.tool_timeout = 0.5 s)"


def test_a_template_that_drops_earlier_thoughts_is_warned_of(tmp_path: Path, rehearsed: Any) -> None:
    template = scripted.TEMPLATE.replace("message['content'] }}", "message['content'].split('</think>')[-1] }}")
    (warning,) = rehearsed("Sound", model=scripted.save_model(tmp_path / "forgetful", template))["warnings"]
    assert warning.startswith("the chat template leaves the thoughts of earlier turns out")


def test_arguments_are_made_of_every_kind_that_a_schema_may_name() -> None:
    kinds = {
        "text": ({"type": "string"}, "1"),
        "choice": ({"type": "string", "enum": ["left", "right"]}, "left"),
        "several": ({"type": ["integer", "string"]}, 1),
        "either": ({"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}]}, [1.0]),
        "nested": ({"type": "array", "items": {"type": "array", "items": {"type": "boolean"}}}, [[True]]),
        "object": ({"type": "object"}, {}),
        "anything": ({}, "1"),
    }
    parameters = {"properties": {name: kind for name, (kind, _) in kinds.items()}, "required": ["text"]}
    tool = {"function": {"parameters": parameters}}
    assert arguments_for(tool, optional=True) == {name: value for name, (_, value) in kinds.items()}
    assert arguments_for(tool, optional=False) == {"text": "1"}


def test_the_rehearsal_may_take_as_long_as_its_calls() -> None:
    values = {"name": "x", "model": {"name_or_path": "m"}, "data": {"train": "t", "eval": "e"}}
    values |= {"rewards": [{"function": "numeric_match"}]}
    brief, long = (
        parse_config({**values, "environment": {"tools": ["calculator"], "tool_timeout": s}}) for s in (1.0, 50.0)
    )
    assert longest_seconds(long) - longest_seconds(brief) >= 4 * 49
