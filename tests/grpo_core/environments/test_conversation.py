"""Conversations with environments in real processes: tokens, messages, failures, limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers.utils import get_json_schema

from benchmarks.command import python_path
from grpo_core.config.environment import EnvironmentConfig
from grpo_core.environments.conversation import Conversation, conversation_metrics, converse
from grpo_core.environments.processes import Environments, Seen
from grpo_core.environments.registry import EnvironmentsError
from grpo_core.rollout.conversations import play
from grpo_core.rollout.types import Sampling
from tests.grpo_core.environments.playing import echo
from tests.grpo_core.environments.scripted import Scripted, call, turns
from tests.processes import existing

HERE = "tests.grpo_core.environments.playing"
FORMAT = turns()
LIMITS = {"tool_timeout": 1.0, "max_turns": 4, "max_tool_calls": 5}


@pytest.fixture(scope="module")
def counting() -> Iterator[Environments]:
    """`Counting` and a tool that keeps nothing."""
    environments = Environments(
        EnvironmentConfig(environment_factory=f"{HERE}:Counting", tools=[f"{HERE}:echo"], **LIMITS)
    )
    yield environments
    environments.close()


def _hold(
    environments: Environments, *scripts: list[str], most: int = 4000, **columns: list[Any]
) -> list[Conversation]:
    """Conversations in which the policy says, turn by turn, what each script says."""
    rows: list[dict[str, Any]] = [
        {
            "prompt": [{"role": "user", "content": f"#{place}"}],
            **{name: values[place] for name, values in columns.items()},
        }
        for place in range(len(scripts))
    ]
    plays = [converse(row, 11, most, environments, FORMAT) for row in rows]
    found: dict[int, Conversation] = {}
    for ended in play(Scripted(scripts, FORMAT), plays, [0] * len(plays), Sampling(most)):
        found |= dict(ended)
    environments.free_all()
    return [found[place] for place in range(len(scripts))]


@pytest.mark.slow
def test_what_the_policy_said_is_kept_and_what_the_environment_said_is_not_trained(counting: Environments) -> None:
    said = [call("add", '{"number": 5}'), "between " + call("echo", '{"text": "hi"}') + call("later"), "the end"]
    (talk,) = _hold(counting, said)
    shown = FORMAT.tokenizer.decode(talk.prompt_ids)
    start = int(shown.partition(" from ")[2].split("<")[0])
    assert [message["role"] for message in talk.said.messages] == [
        "assistant", "tool", "assistant", "tool", "tool", "assistant"
    ]  # fmt: skip
    answers = [m["content"] for m in talk.said.messages if m["role"] == "tool"]
    assert answers == [f"now {start + 5}", "hi", f"later {start + 5}"]
    assert talk.said.messages[2]["content"] == "between"
    assert [it["function"]["name"] for it in talk.said.messages[2]["tool_calls"]] == ["echo", "later"]
    mine = FORMAT.tokenizer.decode([token for token, own in zip(talk.ids, talk.mask, strict=True) if own])
    assert mine == "".join(f"{text}<|im_end|>" for text in said)
    assert {p for p, own in zip(talk.logprobs, talk.mask, strict=True) if not own} == {0.0}
    assert {p for p, own in zip(talk.logprobs, talk.mask, strict=True) if own} == {-0.5}
    assert talk.said.environment_tokens == talk.mask.count(0) > 0
    # The same conversation as the template writes it: an answer stands where the template puts it.
    assert FORMAT.tokenizer.decode(talk.ids).startswith(
        f"{said[0]}<|im_end|>\n<|im_start|>tool\nnow {start + 5}<|im_end|>\n<|im_start|>assistant\nbetween"
    )


def test_completions_of_a_prompt_start_from_the_same_state_and_rewards_see_their_own_environment(
    counting: Environments,
) -> None:
    first, second = _hold(counting, [call("add", '{"number": 1}'), "a"], ["b"])
    starts = [FORMAT.tokenizer.decode(talk.prompt_ids).partition(" from ")[2] for talk in (first, second)]
    assert starts[0] == starts[1]
    count = int(starts[0].split("<")[0])
    assert [Seen(talk.environment, talk.said.reward, 5.0).count for talk in (first, second)] == [count + 1, count]
    assert Seen(second.environment, 0.5, 5.0).number() == 7
    with pytest.raises(AttributeError, match="no_such"):
        _ = Seen(second.environment, None, 5.0).no_such
    (third,) = _hold(counting, ["c"], answer=[str(count)])
    assert (first.said.reward, third.said.reward) == (0.0, 1.0)


FAILURES = {
    "raises": (call("fail"), "Error: ValueError: no such thing"),
    "is unknown": (call("nothing"), "there is no tool 'nothing'; there are echo, add"),
    "is malformed": ("<tool_call>\n{oops\n</tool_call>", "is not valid JSON"),
    "lacks an argument": (call("add"), "missing 1 required positional argument: 'number'"),
    "returns no text": (call("object"), "the tool returned object, which is no text"),
    "returns a megabyte": (call("megabyte"), "1,048,576 characters"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_call_that_fails_is_answered_by_what_is_wrong(counting: Environments, failure: str) -> None:
    text, problem = FAILURES[failure]
    (talk,) = _hold(counting, [text, "well"])
    assert problem in talk.said.messages[1]["content"]
    assert talk.said.failed_calls.total() == 1 and not talk.said.lost_calls and not talk.said.failure
    assert talk.said.messages[-1] == {"role": "assistant", "content": "well"}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["hang", "die"])
def test_an_environment_that_is_lost_ends_its_conversation_alone(counting: Environments, way: str) -> None:
    lost, other = _hold(counting, [call(way), "never said"], [call("number"), "well"])
    assert lost.said.failure.startswith(f"tool {way}: ") and lost.said.reward is None
    assert other.said.messages[-1]["content"] == "well" and other.said.reward is not None
    metrics = conversation_metrics([lost.said, other.said])
    assert metrics["conversations/failed"] == 0.5 and metrics[f"tools/{way}/lost"] == 1.0
    assert not lost.environment.is_running


@pytest.mark.slow
def test_tools_that_keep_nothing_are_started_again() -> None:
    environments = Environments(EnvironmentConfig(tools=[f"{HERE}:hang", f"{HERE}:echo"], tool_timeout=0.3))
    (talk,) = _hold(environments, [call("hang"), call("echo", '{"text": "still here"}'), "well"])
    contents = [message["content"] for message in talk.said.messages]
    assert contents[1] == "Error: its time was up" and contents[3:] == ["still here", "well"]
    assert talk.said.lost_calls == {"hang": 1} and not talk.said.failure
    environments.close()


def test_a_slow_tool_holds_up_no_other_conversation(counting: Environments, tmp_path: Path) -> None:
    """The first one's tool waits for a file that only the second one's end brings."""
    file = tmp_path / "done"
    rows = [{"prompt": [{"role": "user", "content": f"#{place}"}], "path": str(file)} for place in range(2)]
    scripts = [[call("wait_for_file"), "slow"], [call("number"), call("number"), "quick"]]
    plays = [converse(row, 1, 4000, counting, FORMAT) for row in rows]
    order = []
    for ended in play(Scripted(scripts, FORMAT), plays, [0, 0], Sampling(4000)):
        for place, _ in ended:
            order.append(place)
            file.touch()
    counting.free_all()
    assert order == [1, 0]


def test_limits_end_a_conversation(counting: Environments) -> None:
    again = call("number")
    (turns_,) = _hold(counting, [again] * 9)
    assert turns_.said.turns == 4 and turns_.said.calls.total() == 3 and not turns_.truncated
    for said in ([again * 9], [again * 2, again * 3]):
        (calls,) = _hold(counting, [*said, "never said"])
        assert calls.said.calls.total() == 5 and calls.said.turns == len(said) and not calls.truncated
        assert [message["content"] for message in calls.said.messages[1:] if message["role"] == "tool"] == ["7"] * 5
        assert calls.said.messages[-1]["role"] == "tool"
    (cut,) = _hold(counting, [again, "x" * 500], most=300)
    assert cut.truncated and len(cut.ids) + len(" from 000") <= 300 and sum(cut.mask) == cut.mask.count(1)
    shown, said = (len(FORMAT.tokenizer(text)["input_ids"]) for text in (" from 000", f"{again}<|im_end|>"))
    answered = len(FORMAT.answer([{"role": "tool", "name": "number", "content": "7"}]))
    for left, asked in ((0, 1), (1, 2)):  # after the answer: what asks for a turn of 0 tokens asks for none
        (answer,) = _hold(counting, [again, "x"], most=shown + said + answered + left)
        assert answer.truncated and answer.said.turns == asked
        assert (answer.mask.count(0), len(answer.ids)) == ((0, said) if asked == 1 else (answered, said + answered + 1))


@pytest.mark.slow
def test_what_cannot_be_used_is_refused_before_a_conversation() -> None:
    wrong = {
        "no_such_module:Thing": "no_such_module",
        f"{HERE}:Nothing": "Nothing",
        f"{HERE}:echo": "no method reset|cannot be made",
    }
    for source, problem in wrong.items():
        with pytest.raises(EnvironmentsError, match=problem):
            Environments(EnvironmentConfig(environment_factory=source))
    with pytest.raises(EnvironmentsError, match=r"no built-in tool .* 'abacus'"):
        Environments(EnvironmentConfig(tools=["abacus"]))


@pytest.mark.slow
def test_environments_end_with_the_process_that_holds_them(tmp_path: Path) -> None:
    script = (
        "import os, signal\n"
        "from grpo_core.config.environment import EnvironmentConfig\n"
        "from grpo_core.environments.processes import Environments\n"
        f"held = Environments(EnvironmentConfig(environment_factory='{HERE}:Endless'))\n"
        "environment = held.take()\n"
        "environment.ask({'do': 'reset', 'environment': '', 'seed': 1, 'row': {}}, 100)\n"
        "print(environment.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": python_path(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    process = int(done.stdout)
    _, alive = psutil.wait_procs(existing([process]), timeout=30)
    assert not alive


@pytest.mark.slow
def test_a_tool_is_described_as_transformers_does_without_importing_torch() -> None:
    """Every process that describes tools would take seconds more."""
    program = (
        "import json, sys\n"
        "from grpo_core.environments.worker import schema\n"
        "from tests.grpo_core.environments.playing import echo\n"
        "print(json.dumps([schema(echo, 'echo'), 'torch' in sys.modules]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": python_path(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, check=True)
    expected = get_json_schema(echo)
    del expected["function"]["return"]
    assert json.loads(done.stdout) == [expected, False]
