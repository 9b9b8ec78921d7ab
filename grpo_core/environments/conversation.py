"""One conversation, from the environment's reset to its reward, as a generator: it yields a request for a turn of the
policy or for an answer of its environment, and continues when it is sent one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from grpo_core.data.chat import without_gaps
from grpo_core.environments.calls import ERROR, ToolCall
from grpo_core.environments.processes import CallError, Environment, Environments
from grpo_core.environments.turns import TurnFormat


@dataclass(frozen=True)
class Turn:
    """Request for a turn of the policy after these token ids, of at most `max_tokens` tokens. `number`: 0 for the first
    turn."""

    ids: list[int]
    max_tokens: int
    number: int


@dataclass(frozen=True)
class Question:
    """Request to the environment."""

    environment: Environment
    request: Mapping[str, Any]
    seconds: float


class Sampled(Protocol):
    """A turn of the policy: its tokens (the end token included), and whether the limit of tokens cut it off.
    `versions`: of the weights that sampled each token, if the engine says so."""

    ids: list[int]
    logprobs: list[float]
    truncated: bool
    versions: list[int] | None


@dataclass
class Said:
    """Record of a conversation: its messages, and the calls, seconds and tokens that it took."""

    opening: str = ""  # what `reset` returned
    messages: list[dict[str, Any]] = field(default_factory=list)  # after those of the prompt
    turns: int = 0
    calls: Counter[str] = field(default_factory=Counter)  # by tool; "" stands for tools that do not exist
    failed_calls: Counter[str] = field(default_factory=Counter)
    lost_calls: Counter[str] = field(default_factory=Counter)  # of those: hung, or ended their process
    seconds: float = 0.0  # waited for the environment
    tokens: int = 0  # after the prompt
    environment_tokens: int = 0
    reward: float | None = None  # the environment's own
    verifier_error: str = ""  # why a verifier of others gave no verdict about the answer; the reward is then 0
    failure: str = ""  # why the environment could not continue


@dataclass
class Conversation:
    """A conversation as token ids; the lists have one entry per token after the prompt."""

    environment: Environment
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # 0 for tokens of the environment
    mask: list[int] = field(default_factory=list)  # 1: sampled by the policy
    versions: list[int] = field(default_factory=list)  # of the weights; an environment's token has the turn before's
    ages: list[int] | None = None  # weight updates of the engine since each token; None: none since any of them
    truncated: bool = False  # cut off by the limit of tokens
    said: Said = field(default_factory=Said)


REWARD_REQUEST: Mapping[str, Any] = {"do": "invoke", "name": "get_reward", "args": [], "kwargs": {}}
Play = Generator[Turn | Question, Any, Conversation]


def converse(row: Mapping[str, Any], seed: int, max_tokens: int, environments: Environments, turns: TurnFormat) -> Play:
    """Hold a conversation about a row of the data.

    `seed`: of the environment, the same for all completions of a prompt; `max_tokens`: for all that comes after the
    row's prompt, the text that `reset` returns and the answers included.

    Yields a Turn and is sent a Sampled; yields a Question and is sent its answer, or thrown the CallError that it ended
    in. A tool's failure is told to the policy. An environment that is lost ends the conversation without a reward.
    """
    limits, name = environments.config, environments.name_for(row)
    tools, has_reward = environments.tools(name), environments.has_reward(name)
    talk = Conversation(environments.take())
    said = talk.said
    try:
        shown = yield from _ask(talk, environments, reset_request(name, seed, row))
        said.opening = shown or ""
        left = max_tokens - _begin(talk, row["prompt"], shown, tools, turns)
        if left < 1:
            said.failure = f"reset returned more tokens than rollout.max_completion_length={max_tokens}"
            return talk
        while True:
            sampled: Sampled = yield Turn(talk.prompt_ids + talk.ids, left - len(talk.ids), said.turns)
            _add(talk, sampled.ids, sampled.logprobs, sampled.versions or ())
            talk.truncated = sampled.truncated
            said.turns += 1
            text, calls = turns.read(sampled.ids, tools)
            said.messages.append({"role": "assistant", "content": text})
            if calls:
                said.messages[-1]["tool_calls"] = [call.message for call in calls]
            if sampled.truncated or not calls or said.turns == limits.max_turns:
                break
            answers = []
            for call in calls[: limits.max_tool_calls - said.calls.total()]:
                answers.append((yield from _answer(talk, environments, call, tools)))
            ids = turns.answer(answers)
            if len(talk.ids) + len(ids) >= left:
                talk.truncated = True
                break
            said.messages += answers
            _add(talk, ids, None, talk.versions[-1:] * len(ids))
            if said.calls.total() == limits.max_tool_calls or said.seconds >= limits.conversation_timeout:
                break
        if has_reward:
            said.reward = yield from _ask(talk, environments, REWARD_REQUEST)
    except CallError as error:
        said.failure = str(error)
    except GeneratorExit:  # the conversation is abandoned
        environments.free([talk.environment])
        raise
    return talk


def reset_request(name: str, seed: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """Request that begins a conversation about the row. `name`: the environment's; its column is not passed on."""
    columns = {column: value for column, value in row.items() if not (name and column == "environment")}
    return {"do": "reset", "environment": name, "seed": seed, "row": columns}


def _begin(talk: Conversation, prompt: Any, shown: str | None, tools: Mapping[str, Any], turns: TurnFormat) -> int:
    """Put what `reset` returned at the end of the prompt. Returns its length in tokens."""
    messages, schemas = without_gaps(prompt), [*tools.values()]
    talk.prompt_ids = turns.prompt(messages, schemas, shown)
    return len(talk.prompt_ids) - len(turns.prompt(messages, schemas)) if shown else 0


def _add(talk: Conversation, ids: Sequence[int], logprobs: Sequence[float] | None, versions: Sequence[int]) -> None:
    """Add tokens of the policy, or, without log-probabilities, of the environment."""
    talk.ids += ids
    talk.logprobs += [0.0] * len(ids) if logprobs is None else logprobs
    talk.mask += [int(logprobs is not None)] * len(ids)
    talk.versions += versions
    talk.said.tokens += len(ids)
    if logprobs is None:
        talk.said.environment_tokens += len(ids)


def _answer(
    talk: Conversation, environments: Environments, call: ToolCall, tools: Mapping[str, Any]
) -> Generator[Question, Any, dict[str, Any]]:
    """Make a call and return its answer, or its error, as a message. Raises CallError if the environment is lost."""
    said, name = talk.said, call.name if call.name in tools else ""
    said.calls[name] += 1
    try:
        if call.problem:
            raise CallError(call.problem, is_lost=False)
        if not name:
            raise CallError(f"there is no tool {call.name!r}; there are {', '.join(tools)}", is_lost=False)
        content = yield from _ask(talk, environments, {"do": "call", "name": name, "arguments": call.arguments})
    except CallError as error:
        said.failed_calls[name] += 1
        content = f"{ERROR}{error}"
        if error.is_lost:
            said.lost_calls[name] += 1
            if environments.own:
                raise CallError(f"tool {name}: {error}", is_lost=True) from error
            environments.free([talk.environment])
            talk.environment = environments.take()  # tools alone keep nothing from call to call
    return {"role": "tool", "name": name or "unknown", "content": content}


def _ask(talk: Conversation, environments: Environments, request: Mapping[str, Any]) -> Generator[Question, Any, Any]:
    """Ask the environment and return its answer. Raises CallError if the request fails."""
    limits, said, environment = environments.config, talk.said, talk.environment
    start = time.monotonic() - environment.paused
    seconds = min(limits.tool_timeout, max(limits.conversation_timeout - said.seconds, 0.0))
    try:
        answer = yield Question(environment, request, seconds)
    finally:
        said.seconds += time.monotonic() - environment.paused - start
    if "raised" in answer:
        kind, text = answer["raised"]
        raise CallError(f"{kind}: {text}", is_lost=request["do"] != "call")
    said.verifier_error = answer.get("verifier_error", "")
    return answer["value"]


def conversation_metrics(held: Sequence[Said]) -> dict[str, float]:
    """Figures per conversation; empty without any. A tool's metrics have its name, and their shares are of its
    calls."""
    if not held:
        return {}
    made, failed, lost = (
        sum((getattr(said, kind) for said in held), Counter[str]()) for kind in ("calls", "failed_calls", "lost_calls")
    )
    figures = {
        "conversations/mean_turns": sum(said.turns for said in held),
        "conversations/tool_calls": made.total(),
        "conversations/failed_tool_calls": failed.total(),
        "conversations/environment_seconds": sum(said.seconds for said in held),
        "conversations/failed": sum(bool(said.failure or said.lost_calls) for said in held),
        "environment/verifier_errors": sum(bool(said.verifier_error) for said in held),
    }
    found = {name: value / len(held) for name, value in figures.items()}
    for name, count in made.items():
        tool = f"tools/{name or 'unknown'}"
        found |= {f"{tool}/calls": count / len(held), f"{tool}/failed": failed[name] / count}
        found |= {f"{tool}/lost": lost[name] / count}
    tokens, of_environments = sum(said.tokens for said in held), sum(said.environment_tokens for said in held)
    found["conversations/environment_share"] = of_environments / tokens if tokens else 0.0
    return found | {"conversations/max_turns": float(max(said.turns for said in held))}
