"""Try environments and tools on a few rows before the training, and then the rewards, which may look at them.

Entry point: `python -m grpo_core.environments.rehearsal CONFIG TRAIN.parquet OUTPUT.json`. What would end
conversations or the run (a `reset` that raises, a tool that hangs, an answer that is no text, a reward that is no
number) is an error; what only looks wrong is a warning.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_core.config.environment import OWN_REWARD
from grpo_core.config.run import RunConfig
from grpo_core.environments.conversation import REWARD_REQUEST, reset_request
from grpo_core.environments.processes import START_SECONDS, CallError, Environment, Environments, Seen
from grpo_core.environments.registry import EnvironmentsError
from grpo_core.environments.setting import Setting, check_prompt, make_setting
from grpo_core.environments.worker import NO_TEXT
from grpo_core.rewards import rehearsal as rewards
from grpo_core.rewards.batch import short
from grpo_core.rewards.rehearsal import ROWS, TRYING
from grpo_core.system.processes import run_and_leave

SECONDS = 120.0  # after which no further row is tried
SLOW = 1.0  # seconds

Row = Mapping[str, Any]
Rows = Sequence[tuple[int, Row]]  # with their numbers, which seed the environment


@dataclass
class _Part:
    """Seconds, tokens and exceptions of `reset`, `get_reward` or a tool, call by call."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)

    def ask(self, environment: Environment, request: Row, limit: float) -> Any:
        """Return the answer; time the call, also if it raises. Raises CallError."""
        start = time.perf_counter()
        try:
            return _ask(environment, request, limit)
        finally:
            self.seconds.append(time.perf_counter() - start)

    @property
    def figures(self) -> dict[str, Any]:
        """Mean seconds, greatest tokens, and how many calls raised."""
        mean = sum(self.seconds) / len(self.seconds) if self.seconds else 0.0
        return {"seconds": mean, "tokens": max(self.tokens, default=0), "raised": len(self.raised)}


@dataclass
class _Trial:
    """Results of one environment on its rows."""

    label: str
    tools: dict[str, _Part]
    rows: int = 0
    shown: list[str | None] = field(default_factory=list)  # what `reset` returned
    reset: _Part = field(default_factory=_Part)
    get_reward: _Part = field(default_factory=_Part)
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, Any]:
        tools = {name: part.figures for name, part in self.tools.items()}
        return {
            "rows": self.rows,
            "reset": self.reset.figures,
            "get_reward": self.get_reward.figures,
            "tools": tools,
        }


def main() -> None:
    rewards.run("grpo_core.environments.rehearsal", "Try environments, tools and rewards on a few rows.", rehearse)


def rehearse(config: RunConfig, data: Path) -> dict[str, Any]:
    """Return the report of the rewards' rehearsal, with the figures of each environment under `environments`. Raises
    EnvironmentsError, which names all that is broken, and RewardError."""
    tokenizer = rewards.load_tokenizer(config)
    setting = make_setting(config, tokenizer)
    assert setting is not None
    # Imported by another process, in which texts have other hashes.
    again = Environments(config.environment, described=setting.environments)
    try:
        warnings = _notes(config, setting)
        chosen = _rows_by_environment(setting, data)
        deadline = time.monotonic() + SECONDS
        trials = [_rehearsed(config, setting, again, name, rows, deadline) for name, rows in chosen.items()]
        if errors := [error for trial in trials for error in trial.errors]:
            raise EnvironmentsError("\n".join(errors))
        first = [row for rows in chosen.values() for _, row in rows]
        report = rewards.rehearse(config, first, lambda: tokenizer, lambda rows: _begin(setting, rows))
    finally:
        setting.environments.close()
        again.close()
    report["warnings"] += [*warnings, *(warning for trial in trials for warning in trial.warnings)]
    return report | {"environments": {trial.label: trial.figures for trial in trials}}


def longest_seconds(config: RunConfig) -> float:
    """Seconds after which the rehearsal must have ended: each question has its time limit, and once SECONDS are over,
    an environment is asked twice for its first row; then all rows begin again, and three times more for the rewards,
    each time with get_reward."""
    environments = len(config.environment.factories)
    questions = 2 * environments + (1 + 2 * 3) * max(ROWS, environments)
    return rewards.longest_seconds(config) + 2 * START_SECONDS + SECONDS + questions * config.environment.tool_timeout


def arguments_for(tool: Row, optional: bool) -> dict[str, Any]:
    """Arguments that a tool's JSON schema allows; with or without the optional ones."""
    parameters = tool["function"]["parameters"]
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    return {name: _value(kind) for name, kind in properties.items() if optional or name in required}


def _value(kind: Row) -> Any:
    if "enum" in kind:
        return kind["enum"][0]
    if "anyOf" in kind:
        return _value(kind["anyOf"][0])
    name = kind.get("type", "string")
    name = name[0] if isinstance(name, list) else name
    values: dict[str, Any] = {"integer": 1, "number": 1.0, "boolean": True, "object": {}, "null": None}
    return [_value(kind.get("items", {}))] if name == "array" else values.get(name, "1")


def _rows_by_environment(setting: Setting, data: Path) -> dict[str, Rows]:
    """The first rows of each environment, ROWS of them in all, at least one of each that the data has."""
    import pyarrow.parquet as pq

    names = [*setting.environments.own] or [""]
    each = max(ROWS // len(names), 1)
    found: dict[str, list[tuple[int, Row]]] = {name: [] for name in names}
    number = 0
    for batch in pq.ParquetFile(data).iter_batches(batch_size=1024):
        for place in range(batch.num_rows):
            name = "" if names == [""] else batch.column("environment")[place].as_py()
            if len(found[name]) < each:
                found[name] += [(number + place, row) for row in batch.slice(place, 1).to_pylist()]
        number += batch.num_rows
        if all(len(rows) == each for rows in found.values()):
            break
    for rows in found.values():
        for _, row in rows:
            check_prompt(row["prompt"])
    return {name: rows for name, rows in found.items() if rows}


def _rehearsed(
    config: RunConfig, setting: Setting, again: Environments, name: str, rows: Rows, deadline: float
) -> _Trial:
    """Try one environment on its rows."""
    trial = _Trial(_label(config, name), {tool: _Part() for tool in setting.environments.tools(name)})
    trial.warnings += _poorly_described(trial.label, setting.environments.tools(name))
    print(f"{TRYING}environment {trial.label}", flush=True)
    _try(setting, name, rows, trial, deadline)
    if not trial.errors:
        trial.warnings += _unrepeatable_reset(again, name, rows, trial)
        trial.errors += _reset_too_long(trial, config.rollout.max_completion_length)
        trial.warnings += _suspicions(trial, config.rollout.max_completion_length)
    return trial


def _try(setting: Setting, name: str, rows: Rows, trial: _Trial, deadline: float) -> None:
    """Begin each row, call every tool, ask for the reward."""
    environments, limit = setting.environments, setting.environments.config.tool_timeout
    broken: set[str] = set()  # tools that are not called again
    for place, row in rows:
        if trial.rows and time.monotonic() > deadline:
            break
        environment, what = environments.take(), "reset"
        try:
            shown = trial.reset.ask(environment, reset_request(name, place, row), limit)
            trial.shown.append(shown)
            trial.reset.tokens.append(len(setting.encode(row, shown)) - len(setting.encode(row)))
            if not _call_each(setting, environment, name, trial, broken, deadline):
                continue
            what = "get_reward"
            if environments.has_reward(name):
                value = trial.get_reward.ask(environment, REWARD_REQUEST, limit)
                if not (value is None or (isinstance(value, (int, float)) and math.isfinite(value))):
                    raise CallError(
                        f"it returned {short(value)}; return a finite number, or None where it does not apply", False
                    )
        except CallError as error:
            trial.errors.append(f"{trial.label}: {what}, with row {place}: {_why(error, limit)}")
            break
        finally:
            trial.rows += 1
            environments.free_all()


def _call_each(
    setting: Setting, environment: Environment, name: str, trial: _Trial, broken: set[str], deadline: float
) -> bool:
    """Call every tool that is not broken. Returns True if the environment can continue."""
    limit = setting.environments.config.tool_timeout
    for tool, schema in setting.environments.tools(name).items():
        if tool in broken or time.monotonic() > deadline:
            continue
        part, arguments = trial.tools[tool], arguments_for(schema, optional=trial.rows % 2 == 0)
        said = f"tool {tool}({', '.join(f'{key}={short(value)}' for key, value in arguments.items())})"
        try:
            answer = part.ask(environment, {"do": "call", "name": tool, "arguments": arguments}, limit)
            part.tokens.append(len(setting.turns.answer([{"role": "tool", "name": tool, "content": answer}])))
        except CallError as error:
            if not (error.is_lost or str(error).endswith(NO_TEXT)):
                part.raised.append(f"{said}: {error}")
                continue
            trial.errors.append(f"{trial.label}: {said}: {_why(error, limit)}")
            broken.add(tool)
            if error.is_lost:
                return False
    return True


def _poorly_described(label: str, tools: Mapping[str, Any]) -> Iterator[str]:
    """Warnings about an environment without tools, and about arguments of which the policy is told too little."""
    if not tools:
        yield (
            f"{label}: it has no tools, so each conversation ends after one turn; tools are public methods, except "
            "reset, get_reward and class methods"
        )
    for name, tool in tools.items():
        for argument, kind in tool["function"]["parameters"].get("properties", {}).items():
            kind = kind.get("items", kind)
            if "object" in kind.get("type", ()) and not kind.keys() & {"properties", "additionalProperties"}:
                yield (
                    f"{label}: the policy is told that the argument {argument!r} of the tool {name!r} is an object, "
                    "and not what is in it, and the tool gets a dictionary, whatever class it names; write str, int, "
                    "float, bool, Literal[…], list[…] or dict[str, …]"
                )


def _unrepeatable_reset(again: Environments, name: str, rows: Rows, trial: _Trial) -> list[str]:
    """A warning if the same rows, begun in another process and another order, do not begin with the same texts."""
    environment = again.take()
    for (place, row), shown in reversed([*zip(rows, trial.shown, strict=False)]):
        try:
            text = _ask(environment, reset_request(name, place, row), again.config.tool_timeout)
        except CallError as error:
            text = f"({error})"
        if text != shown:
            return [
                f"{trial.label}: reset gave two texts for row {place} and the same seed, {short(shown)} and "
                f"{short(text)}: completions of a prompt would be compared that started from different states, and no "
                "training could be repeated. Draw from `random` or numpy's global generator alone, which are seeded "
                "before each reset, and keep nothing from one conversation to the next"
            ]
    return []


def _reset_too_long(trial: _Trial, max_tokens: int) -> list[str]:
    """An error if no turn can be sampled after any reset."""
    least = min(trial.reset.tokens)
    if least < max_tokens:
        return []
    return [
        f"{trial.label}: what reset returns has {least:,} tokens or more, and a conversation may have "
        f"rollout.max_completion_length = {max_tokens:,} after its prompt: nothing is left for the policy"
    ]


def _suspicions(trial: _Trial, max_tokens: int) -> Iterator[str]:
    """Warnings about calls that return much, are slow, or raise for all arguments that were tried."""
    parts = {"reset": trial.reset, "get_reward": trial.get_reward}
    parts |= {f"the tool {tool!r}": part for tool, part in trial.tools.items()}
    for what, part in parts.items():
        figures = part.figures
        if figures["tokens"] > max_tokens / 2:
            yield (
                f"{trial.label}: {what} returns up to {figures['tokens']:,} tokens, most of the {max_tokens:,} that a "
                "conversation may have after its prompt (rollout.max_completion_length)"
            )
        if figures["seconds"] > SLOW:
            yield (
                f"{trial.label}: {what} takes {figures['seconds']:.1f} s; a conversation waits for it each time that "
                "it is asked"
            )
        if len(part.raised) == trial.rows:
            yield (
                f"{trial.label}: {part.raised[0]}. All {trial.rows} calls raised, with arguments made from its schema; "
                "fine if it asks for others: the policy is told what was raised"
            )


def _notes(config: RunConfig, setting: Setting) -> list[str]:
    """Warnings about model and configuration, whatever the rows. Raises EnvironmentsError if no environment gives the
    reward that is asked for."""
    own, found = setting.environments.own, []
    judged = [_label(config, name) for name in own if setting.environments.has_reward(name)]
    counts = any(reward.function == OWN_REWARD for reward in config.rewards)
    if counts and not judged:
        raise EnvironmentsError(
            "the reward 'environment' is what an environment's get_reward gives, and "
            f"{', '.join(_label(config, name) for name in own)} has no such method; write it, or remove the reward"
        )
    if judged and not counts:
        found.append(
            f"{judged[0]} has a method get_reward, and what it gives does not count: no reward is called 'environment'"
        )
    return found + [note for note in [setting.turns.note("tool")] if note]


def _begin(setting: Setting, rows: Sequence[Row]) -> list[Seen]:
    """Begin a conversation for each row, and return its environment as rewards see it after a turn without calls."""
    environments, limit = setting.environments, setting.environments.config.tool_timeout
    seen = []
    for place, row in enumerate(rows):
        environment, name = environments.take(), environments.name_for(row)
        try:
            _ask(environment, reset_request(name, place, row), limit)
            reward = _ask(environment, REWARD_REQUEST, limit) if environments.has_reward(name) else None
        except CallError as error:
            raise EnvironmentsError(
                f"environment: a conversation without calls, about {short(row)}: {_why(error, limit)}"
            ) from error
        seen.append(Seen(environment, reward, limit))
    return seen


def _ask(environment: Environment, request: Row, limit: float) -> Any:
    """Ask a question and return its answer. Raises CallError."""
    environment.ask(request, limit)
    while (answer := environment.answer(limit)) is None:
        pass
    if "raised" in answer:
        raise CallError(": ".join(answer["raised"]), is_lost=False)
    return answer["value"]


def _why(error: CallError, limit: float) -> str:
    return f"{error} (environment.tool_timeout = {limit:g} s)" if error.is_lost else str(error)


def _label(config: RunConfig, name: str) -> str:
    """Name of an environment in reports: its own, else its class's, or `tools` without a class."""
    return name or config.environment.factories.get(name, "tools")


if __name__ == "__main__":
    run_and_leave(main)
