"""Try environments and tools on a few rows before any GPU is used, and then the rewards, which may look at them.

Entry point: `python -m grpo_core.environments.rehearsal CONFIG TRAIN.parquet OUTPUT.json`. What would end
conversations or the run (a `reset` that raises, a tool that hangs, an answer that is no text, a reward that is no
number) is an error; what only looks wrong is a warning.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_core.config.run import RunConfig
from grpo_core.data.chat import without_gaps
from grpo_core.environments.processes import START_SECONDS, CallError, Environment, Environments, Seen
from grpo_core.environments.registry import EnvironmentsError
from grpo_core.environments.setting import Setting, check_prompt, make_setting
from grpo_core.environments.worker import NO_TEXT
from grpo_core.rewards import rehearsal as rewards
from grpo_core.rewards.rehearsal import ROWS, TRYING
from grpo_core.rewards.scoring import short

SECONDS = 120.0  # after which no further row is tried
SLOW = 1.0  # seconds
REWARD = {"do": "invoke", "name": "get_reward", "args": [], "kwargs": {}}

Row = Mapping[str, Any]


@dataclass
class _Trial:
    """What one environment did on its rows. `seconds`, `tokens`: of reset, get_reward and each tool, call by call."""

    label: str
    rows: int = 0
    shown: list[str | None] = field(default_factory=list)  # what `reset` returned
    seconds: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    raised: dict[str, list[str]] = field(default_factory=dict)  # by tool
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def ask(self, what: str, environment: Environment, request: Row, limit: float) -> Any:
        """The answer, timed. Raises CallError."""
        start = time.perf_counter()
        value = _ask(environment, request, limit)
        self.seconds.setdefault(what, []).append(time.perf_counter() - start)
        return value


def main() -> None:
    rewards.run("grpo_core.environments.rehearsal", "Try environments, tools and rewards on a few rows.", rehearse)


def rehearse(config: RunConfig, data: Path) -> dict[str, Any]:
    """The report of the rewards' rehearsal, with what each environment took and gave under `environments`. Raises
    EnvironmentsError that names all that is broken, and RewardError."""
    tokenizer = rewards.load_tokenizer(config)
    setting = make_setting(config, tokenizer)
    assert setting is not None
    again = Environments(config.environment)  # imported by another process, with other hashes of texts
    chosen = _rows_by_environment(setting, data)
    try:
        warnings = _notes(config, setting)
        deadline = time.monotonic() + SECONDS
        trials: dict[str, _Trial] = {}
        for name, rows in chosen.items():
            print(f"{TRYING}environment {_label(config, name)}", flush=True)
            trials[name] = trial = _try(config, setting, name, rows, deadline)
            if not trial.errors:
                _try_again(again, name, rows, trial)
                _look_at(trial, config)
        if errors := [error for trial in trials.values() for error in trial.errors]:
            raise EnvironmentsError("\n".join(errors))
        first = [row for rows in chosen.values() for _, row in rows]
        report = rewards.rehearse(config, first, lambda: tokenizer, lambda rows: _begin(setting, rows))
    finally:
        setting.environments.close()
        again.close()
    report["warnings"] += [*warnings, *(warning for trial in trials.values() for warning in trial.warnings)]
    return report | {"environments": {_label(config, name): _figures(trial) for name, trial in trials.items()}}


def longest(config: RunConfig) -> float:
    """Seconds after which the rehearsal must have ended: each question has its time limit."""
    questions = 4 * len(config.environment.factories or [""]) + 2 * 3 * ROWS
    return rewards.longest(config) + 2 * START_SECONDS + SECONDS + questions * config.environment.tool_timeout


def arguments_for(tool: Row, optional: bool) -> dict[str, Any]:
    """Arguments that a tool's JSON schema allows; with or without the optional ones."""
    parameters = tool["function"]["parameters"]
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    return {name: _value(kind) for name, kind in properties.items() if optional or name in required}


def _value(kind: Row) -> Any:
    if "enum" in kind:
        return kind["enum"][0]
    name = kind.get("type", "string") if "anyOf" not in kind else _value(kind["anyOf"][0])
    if "anyOf" in kind:
        return name
    if isinstance(name, list):
        name = name[0]
    values: dict[str, Any] = {"integer": 1, "number": 1.0, "boolean": True, "object": {}, "null": None}
    return [_value(kind.get("items", {}))] if name == "array" else values.get(name, "1")


def _rows_by_environment(setting: Setting, data: Path) -> dict[str, list[tuple[int, Row]]]:
    """The first rows of each environment with their numbers, ROWS of them in all, at least one of each."""
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


def _try(config: RunConfig, setting: Setting, name: str, rows: Sequence[tuple[int, Row]], deadline: float) -> _Trial:
    """Begin each row, call every tool, ask for the reward."""
    environments, trial, limit = setting.environments, _Trial(_label(config, name)), config.environment.tool_timeout
    schemas = environments.tools(name)
    tools = dict(schemas)
    environment = environments.take()
    for place, row in rows:
        if trial.rows and time.monotonic() > deadline:
            break
        try:
            shown = trial.ask("reset", environment, _reset(name, place, row), limit)
        except CallError as error:
            trial.errors.append(f"{trial.label}: reset, with row {place}: {_why(error, limit)}")
            break
        trial.shown.append(shown)
        trial.tokens.setdefault("reset", []).append(_reset_tokens(setting, row, shown))
        for tool in [*tools]:
            arguments = arguments_for(schemas[tool], optional=trial.rows % 2 == 0)
            said = f"tool {tool}({', '.join(f'{key}={short(value)}' for key, value in arguments.items())})"
            if time.monotonic() > deadline:
                break
            try:
                answer = trial.ask(tool, environment, {"do": "call", "name": tool, "arguments": arguments}, limit)
            except CallError as error:
                if error.is_lost or str(error).endswith(NO_TEXT):
                    trial.errors.append(f"{trial.label}: {said}: {_why(error, limit)}")
                    del tools[tool]
                else:
                    trial.raised.setdefault(tool, []).append(f"{said}: {error}")
                if error.is_lost:
                    environment = environments.take()
                    break
                continue
            message = {"role": "tool", "name": tool, "content": answer}
            trial.tokens.setdefault(tool, []).append(len(setting.turns.answer([message])))
        else:
            if environments.has_reward(name):
                try:
                    value = trial.ask("get_reward", environment, REWARD, limit)
                except CallError as error:
                    trial.errors.append(f"{trial.label}: get_reward, with row {place}: {_why(error, limit)}")
                    break
                if not (value is None or (isinstance(value, (int, float)) and math.isfinite(value))):
                    trial.errors.append(
                        f"{trial.label}: get_reward returned {short(value)} with row {place}; return a finite number, "
                        "or None where it does not apply"
                    )
                    break
        trial.rows += 1
    return trial


def _try_again(again: Environments, name: str, rows: Sequence[tuple[int, Row]], trial: _Trial) -> None:
    """Begin the same rows in another process, in another order: the same texts have to come."""
    environment = again.take()
    for (place, row), shown in reversed([*zip(rows, trial.shown, strict=False)]):
        try:
            text = _ask(environment, _reset(name, place, row), again.config.tool_timeout)
        except CallError as error:
            text = f"({error})"
        if text != shown:
            trial.warnings.append(
                f"{trial.label}: reset gave two texts for row {place} and the same seed, {short(shown)} and "
                f"{short(text)}: completions of a prompt would be compared that started from different states, and no "
                "training could be repeated. Draw from `random` or numpy's global generator alone, which are seeded "
                "before each reset, and keep nothing from one conversation to the next"
            )
            return


def _look_at(trial: _Trial, config: RunConfig) -> None:
    """Warnings, and an error if no turn can be sampled."""
    most = config.rollout.max_completion_length
    for what, tokens in trial.tokens.items():
        said = "what reset returns" if what == "reset" else f"an answer of the tool {what!r}"
        if what == "reset" and min(tokens) >= most:
            trial.errors.append(
                f"{trial.label}: {said} has {min(tokens):,} tokens or more, and a conversation may have "
                f"rollout.max_completion_length = {most:,} after its prompt: nothing is left for the policy"
            )
        elif max(tokens) > most / 2:
            trial.warnings.append(
                f"{trial.label}: {said} has up to {max(tokens):,} tokens, most of the {most:,} that a conversation may "
                "have after its prompt (rollout.max_completion_length)"
            )
    for what, seconds in trial.seconds.items():
        if (mean := _mean(seconds)) > SLOW:
            said = what if what in ("reset", "get_reward") else f"the tool {what!r}"
            trial.warnings.append(
                f"{trial.label}: {said} takes {mean:.1f} s; a conversation waits for each of its calls"
            )
    for tool, problems in trial.raised.items():
        if len(problems) == trial.rows:
            trial.warnings.append(
                f"{trial.label}: {problems[0]}. Each of the {len(problems)} calls raised, with arguments made from its "
                "schema; fine if it asks for others: the policy is told what was raised"
            )


def _notes(config: RunConfig, setting: Setting) -> list[str]:
    """What is said of model and configuration, whatever the rows."""
    own, found = setting.environments.own, []
    judged = [name for name in own if setting.environments.has_reward(name)]
    counts = any(reward.function == "environment" for reward in config.rewards)
    if counts and not judged:
        raise EnvironmentsError(
            "the reward 'environment' is what an environment's get_reward gives, and "
            f"{', '.join(_label(config, name) for name in own)} has no such method; write it, or remove the reward"
        )
    if judged and not counts:
        found.append(
            f"{_label(config, judged[0])} has a method get_reward, and what it gives does not count: no reward is "
            "called 'environment'"
        )
    return found + [note for note in [setting.turns.note("tool")] if note]


def _begin(setting: Setting, rows: Sequence[Row]) -> list[Seen]:
    """A conversation's environment for each row, as rewards see it after a turn without calls."""
    environments, seen = setting.environments, []
    limit = environments.config.tool_timeout
    for place, row in enumerate(rows):
        environment, name = environments.take(), environments.name_for(row)
        try:
            _ask(environment, _reset(name, place, row), limit)
            reward = _ask(environment, REWARD, limit) if environments.has_reward(name) else None
        except CallError as error:
            raise EnvironmentsError(f"environment: a conversation without calls cannot be held: {error}") from error
        seen.append(Seen(environment, reward, limit))
    return seen


def _ask(environment: Environment, request: Row, limit: float) -> Any:
    """The answer to a question. Raises CallError."""
    environment.ask(request, limit)
    while (answer := environment.answer(limit)) is None:
        pass
    if "raised" in answer:
        raise CallError(": ".join(answer["raised"]), is_lost=False)
    return answer["value"]


def _reset(name: str, place: int, row: Row) -> dict[str, Any]:
    return {"do": "reset", "environment": name, "seed": place, "row": dict(row)}


def _reset_tokens(setting: Setting, row: Row, shown: str | None) -> int:
    messages = without_gaps(row["prompt"])
    messages[-1]["content"] += shown or ""
    return len(setting.encode({**row, "prompt": messages})) - len(setting.encode(row))


def _why(error: CallError, limit: float) -> str:
    return f"{error} (environment.tool_timeout = {limit:g} s)" if error.is_lost else str(error)


def _label(config: RunConfig, name: str) -> str:
    factories = config.environment.factories
    return factories[name] if name in factories else "tools"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _figures(trial: _Trial) -> dict[str, Any]:
    """Mean seconds and greatest tokens of what the environment did."""
    return {
        "rows": trial.rows,
        "parts": {
            what: {
                "seconds": _mean(trial.seconds.get(what, [])),
                "tokens": max(trial.tokens.get(what, [0])),
                "raised": len(trial.raised.get(what, [])),
            }
            for what in {**trial.seconds, **trial.raised}
        },
    }


if __name__ == "__main__":
    main()
