"""`grpo env try`: a conversation with a configuration's environment or tools, in which a person or a script writes the
policy's turns."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from flows.cli.rewards import read_row, rewards_table
from flows.cli.terminal import LONGEST, Terminal, refusals, refuse, say, set_option
from grpo_core.config.files import load_config
from grpo_core.config.run import RunConfig
from grpo_core.environments.calls import ToolCall
from grpo_core.errors import ConfigError, GrpoError
from grpo_core.rewards.batch import short
from grpo_core.rewards.contract import check_environments, rewards_of
from grpo_core.system.libraries import quiet_libraries
from tasks.rendering.visible import shortened

if TYPE_CHECKING:
    from grpo_core.environments.setting import Setting
    from grpo_core.rollout.collect import Sample
    from grpo_core.rollout.types import Completion, Request, Sampling, Stream

app = typer.Typer(no_args_is_help=True, help="Environments and tools: try what a policy would meet.")
POLICY, ENVIRONMENT = "green", "cyan"
USAGE = (
    "You are the policy. Call a tool as {example}, or as JSON with name and arguments. Anything else is what the "
    'policy says, and ends the conversation; "in quotes", it may have \\n in it. Ctrl-D says nothing.'
)


@app.command("try")
def try_environment(
    config: Annotated[Path, typer.Argument(help="run configuration (TOML), such as configs/calculator.toml")],
    row: Annotated[int, typer.Option(min=0, help="row of data.train, from 0")] = 0,
    script: Annotated[Path | None, typer.Option(help="file with the policy's turns, one per line, as typed")] = None,
    overrides: Annotated[list[str] | None, set_option()] = None,
) -> None:
    """Hold a conversation about a row: you write the policy's turns, the environment answers as in training.

    Shows what the model would see, which tokens would be trained, and the rewards. Exit status 1: the environment, a
    reward or the script failed, 2: it cannot be tried.
    """
    quiet_libraries()
    run = load_config(config, overrides)
    with refusals(str(config)):
        if not run.environment.is_used:
            refuse("its [environment] names neither a class (environment_factory) nor tools: there is nothing to try")
        lines = _lines(script)
        rewards = rewards_of(run)
        check_environments(rewards, are_there=True)
        values = read_row(run, rewards, row)
        from grpo_core.environments.setting import check_prompt, make_setting
        from tasks.data.lengths import load_tokenizer_and_context
        from tasks.stages.base_model import with_checkpoint

        check_prompt(values["prompt"])
        run = with_checkpoint(run, say)
        tokenizer, _ = load_tokenizer_and_context(run.model)
        setting = make_setting(run, tokenizer)
        assert setting is not None
        prompt_ids = setting.encode(values)
    terminal = Terminal(soft_wrap=True)
    with refusals(str(config), started=True):
        from grpo_core.data.prompts import Prompts
        from grpo_core.rollout.collect import Scoring, sample_and_score
        from grpo_core.rollout.types import Request, Sampling

        tools = setting.environments.tools(setting.environments.name_for(values))
        _introduce(terminal, run, row, values, tools, lines is None)
        engine: Any = _Typed(terminal, setting, tools, lines)
        most = run.rollout.max_completion_length
        # A conversation's seed is the number of its row, so the row keeps its position.
        prompts = Prompts([dict(values)] * (row + 1), [prompt_ids] * (row + 1), len(prompt_ids))
        try:
            requests, scoring = [Request(prompt_ids, 1, 0, row=row)], Scoring(tokenizer, rewards, setting)
            (sample,), _ = sample_and_score(engine, requests, Sampling(most), prompts, scoring)
        finally:
            setting.environments.close()
        _summarize(terminal, run, sample)


class _Typed:
    """An engine whose turns come from the terminal or a script."""

    def __init__(self, terminal: Terminal, setting: Setting, tools: Mapping[str, Any], lines: Iterator[str] | None):
        self.terminal, self.turns, self.tools, self.lines = terminal, setting.turns, tools, lines
        self.seen = 0  # tokens of the conversation shown so far

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Stream:
        from grpo_core.rollout.types import token_limit

        number, more = 0, requests
        while more:
            (request,) = more
            more = (yield [(number, [self._turn(request, token_limit(request, sampling))])]) or ()
            number += 1

    def _turn(self, request: Request, most: int) -> Completion:
        from grpo_core.rollout.types import Completion

        self._show("environment" if self.seen else "prompt", request.prompt_ids[self.seen :], "not trained")
        ids = self.turns.tokenizer(self._text() + self.turns.ends[0], add_special_tokens=False)["input_ids"]
        kept = ids[:most]
        self._show("policy", kept, f"trained; {most - len(kept):,} are left")
        self.seen = len(request.prompt_ids) + len(kept)
        return Completion(kept, [0.0] * len(kept), truncated=len(kept) < len(ids))

    def _text(self) -> str:
        """Return the next turn as the policy would write it. After a mistyped call, ask for the line again."""
        while True:
            try:
                turn = read_turn(self._line(), self.tools)
                return turn if isinstance(turn, str) else self.turns.write(turn)
            except GrpoError as error:
                if self.lines is not None:
                    raise
                self.terminal.print(str(error), style="red")

    def _line(self) -> str:
        with suppress(EOFError, StopIteration):
            return input("\npolicy> ") if self.lines is None else next(self.lines)
        return ""

    def _show(self, who: str, ids: Sequence[int], note: str) -> None:
        style = {"policy": POLICY, "environment": ENVIRONMENT}.get(who, "")
        said = Text(shortened(self.turns.tokenizer.decode(ids).strip("\n"), LONGEST), style=style)
        said.highlight_words(self.turns.tokenizer.all_special_tokens, "dim")
        self.terminal.print(f"\n{who}: {len(ids):,} tokens, {note}", style="bold")
        self.terminal.print(said)


def read_turn(line: str, tools: Mapping[str, Any]) -> str | list[ToolCall]:
    """Read a typed line as the policy's turn: its text, or the calls that it makes. Raises ConfigError if the line
    resembles a call but is invalid."""
    line = line.strip()
    if line[:1] in ("{", "[", '"') and (turn := _from_json(line)) is not None:
        return turn
    if not (written := re.fullmatch(r"(\w+)\((.*)\)", line, re.DOTALL)):
        return line
    name = written[1]
    names = [*_parameters(tools[name])] if name in tools else []
    try:
        call: Any = ast.parse(line, mode="eval").body
        named = {keyword.arg or "**": ast.literal_eval(keyword.value) for keyword in call.keywords}
        given = [ast.literal_eval(argument) for argument in call.args]
        places = names[: len(given)] if name in tools else [f"argument{place}" for place in range(len(given))]
        return [ToolCall(name, {**dict(zip(places, given, strict=True)), **named})]
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        if name not in tools:
            return line
        raise ConfigError(
            f"{line}: arguments are written as in Python, texts in quotes: {_example(name, names)}; to say it as text, "
            "put it all in quotes"
        ) from error


def _from_json(line: str) -> str | list[ToolCall] | None:
    """Read a line of JSON: a text, or calls. None if it is neither."""
    try:
        found = json.loads(line)
    except ValueError as error:
        if line.startswith("{"):
            raise ConfigError(f"{line}: not a valid call in JSON: {error}") from error
        return None
    if isinstance(found, str):
        return found
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        return None
    return [ToolCall(call["name"], call.get("arguments", {})) for call in calls]


def _example(name: str, names: Sequence[str]) -> str:
    return f"{name}({', '.join(f'{key}=…' for key in names)})"


def _lines(script: Path | None) -> Iterator[str] | None:
    if script is None:
        return None
    try:
        return iter(script.read_text().splitlines())
    except (OSError, UnicodeDecodeError) as error:
        refuse(f"--script {script}: cannot be read: {error}")


def _parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return tool["function"]["parameters"].get("properties", {})


def _introduce(
    terminal: Terminal, run: RunConfig, row: int, values: Mapping[str, Any], tools: Mapping[str, Any], is_typed: bool
) -> None:
    limits = run.environment
    terminal.print(
        f"row {row}: at most {limits.max_turns} turns, {limits.max_tool_calls} tool calls and "
        f"{run.rollout.max_completion_length:,} tokens after the prompt",
        style="bold",
    )
    for column, value in values.items():
        if column != "prompt":
            terminal.print(f"  {column}: {short(value)}", style="dim")
    for name, tool in tools.items():
        described = " ".join(tool["function"]["description"].split())
        terminal.print(f"  {name}({', '.join(_parameters(tool))})  {described}")
    if is_typed:
        with suppress(ImportError):
            import readline  # noqa: F401  (arrow keys and history at the prompt)
        name, tool = next(iter(tools.items()), ("tool", {}))
        example = _example(name, [*_parameters(tool)] if tool else [])
        terminal.print(USAGE.format(example=example), style="yellow")


def _summarize(terminal: Terminal, run: RunConfig, sample: Sample) -> None:
    """Print why the conversation ended, its tokens, and the rewards."""
    import numpy as np

    from grpo_core.rewards.composition import counted, weighted_sum

    said, completion = sample.said, sample.completion
    assert said is not None
    if said.failure:
        refuse(f"the environment failed: {said.failure}; in training, this conversation would have no reward", 1)
    terminal.print(f"\nended: {_end(run, sample)}", style="bold")
    terminal.print(
        f"tokens: prompt {len(sample.prompt_ids):,}; policy {completion.sampled_tokens:,}, trained; environment "
        f"{said.environment_tokens:,}, not trained. Waited for the environment: {said.seconds:.2f} s",
    )
    if said.verifier_error:
        terminal.print(f"the verifier gave no verdict, which is a reward of 0: {said.verifier_error}", style="yellow")
    given = np.array([sample.rewards])
    (values,), (counts,), (total,) = given, counted(given, run.rewards), weighted_sum(given, run.rewards)
    terminal.print(rewards_table(run.rewards, values, counts, total))


def _end(run: RunConfig, sample: Sample) -> str:
    said, limits = sample.said, run.environment
    assert said is not None
    last = said.messages[-1] if said.messages else {}
    if sample.completion.truncated:
        return f"no tokens are left (rollout.max_completion_length = {run.rollout.max_completion_length:,})"
    if said.seconds >= limits.conversation_timeout:
        return f"environment.conversation_timeout = {limits.conversation_timeout:g} s"
    if last.get("tool_calls") and said.turns == limits.max_turns:
        return f"environment.max_turns = {limits.max_turns}; the last calls were not made"
    if said.calls.total() == limits.max_tool_calls:
        return f"environment.max_tool_calls = {limits.max_tool_calls}"
    return "the policy called no tool"
