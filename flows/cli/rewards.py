"""`grpo rewards list`: the built-in rewards. `grpo rewards try`: a completion, scored by a configuration's rewards."""

from __future__ import annotations

import bisect
import inspect
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.table import Table

from flows.cli.terminal import Terminal, refusals, set_option
from grpo_core.config.files import load_config
from grpo_core.config.inputs import RewardConfig
from grpo_core.config.run import RunConfig
from grpo_core.data.chat import completion_of
from grpo_core.errors import ConfigError
from grpo_core.rewards.batch import Batch, ended_ids
from grpo_core.rewards.contract import Reward, resolve_here, rewards_of
from grpo_core.rewards.registry import BUILTIN
from grpo_core.rewards.rehearsal import reads_as_text
from grpo_core.rewards.scoring import score
from grpo_core.system.libraries import quiet_libraries
from tasks.processes.gpus.locks import one_free_gpu
from tasks.rendering.visible import shortened

if TYPE_CHECKING:
    import numpy as np

app = typer.Typer(no_args_is_help=True, help="The built-in rewards, and what a configuration's rewards give.")


@app.command("list")
def list_rewards() -> None:
    """List the built-in rewards: range, columns they read, arguments, meaning."""
    terminal = Terminal()
    for name, record in sorted(BUILTIN.items()):
        low, high = record.range
        columns, arguments = _parameters(name)
        terminal.print(f"{name}   [{low:g} to {high:g}]", style="bold")
        lines = [
            _first_sentence(record.function),
            columns and f"columns: {columns}",
            arguments and f"arguments: {arguments}",
        ]
        terminal.print(Padding("\n".join(filter(None, lines)), (0, 0, 0, 4)))


@app.command("try")
def try_rewards(
    config: Annotated[Path, typer.Argument(help="run configuration (TOML), such as configs/quickstart.toml")],
    completions: Annotated[
        list[str], typer.Option("--completion", metavar="TEXT", help="a completion; repeat it for a group")
    ],
    row: Annotated[int, typer.Option(min=0, help="row of data.train, from 0")] = 0,
    overrides: Annotated[list[str] | None, set_option()] = None,
) -> None:
    """Show each reward's value for a completion of a row, how much of it counts, and the sum.

    Exit status 1: a reward failed, 2: it cannot be tried.
    """
    quiet_libraries()
    import numpy as np

    from grpo_core.rewards.composition import counted, weighted_sum

    with refusals(str(config)):
        run = load_config(config, overrides)
        rewards = rewards_of(run)
        batch = _batch(run, rewards, row, completions)
    with refusals(str(config), started=True), one_free_gpu():
        by_reward = score(rewards, batch)
        own = [not ((known := BUILTIN.get(it.function)) and known.asks_a_model) for it in run.rewards]
        blind = [
            reads_as_text(reward, batch, values)
            for reward, values, asked in zip(rewards, by_reward, own, strict=True)
            if asked
        ]
    given = np.array(by_reward).T  # (N, K)
    terminal = Terminal()
    terminal.print(f"row {row}", *_row_as_lines(batch.rows[0], rewards), sep="\n")
    for text, values, counts, total in zip(
        completions, given, counted(given, run.rewards), weighted_sum(given, run.rewards), strict=True
    ):
        terminal.print(f"\ncompletion {shortened(repr(text))}")
        terminal.print(rewards_table(run.rewards, values, counts, total))
    for problem in filter(None, blind):
        terminal.print(f"\n{problem}", style="yellow")


def _parameters(name: str) -> tuple[str, str]:
    """Return the columns that a built-in reward reads, and its arguments, those with a default last."""
    reward = resolve_here(RewardConfig(function=name))  # also where its libraries are not installed
    columns = [column for column, kind in reward.columns.items() if kind is not Any]
    required = [column for column in reward.columns if column not in columns]
    parameters = inspect.signature(reward.function).parameters.values()
    optional = [f"{it.name} = {_default(it.default)}" for it in parameters if it.default is not it.empty]
    return ", ".join(columns), ", ".join([*required, *optional])


def _default(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 30 else "…"


def _first_sentence(function: Any) -> str:
    text = " ".join((inspect.getdoc(function) or "").split())
    return re.split(r"(?<=\.) (?=[A-Z`])", text)[0]


def read_row(config: RunConfig, rewards: Sequence[Reward], row: int) -> dict[str, Any]:
    """Return a row of the training prompts. Raises ConfigError if there is none, or if a reward reads a column that the
    row lacks."""
    from tasks.data.sources import load_training_prompts

    prompts = load_training_prompts(config.data)
    ends = [*itertools.accumulate(rows.height for rows in prompts.values())]
    if row >= ends[-1]:
        keys = ", ".join(source.key for source in prompts)
        raise ConfigError(f"--row {row}: {keys} has {ends[-1]:,} rows, counted from 0")
    source, rows = [*prompts.items()][bisect.bisect(ends, row)]
    frame = rows.gather([row - ends[bisect.bisect(ends, row)] + rows.height])
    if "prompt" not in frame.columns:
        from tasks.data.column_fixes import missing_column
        from tasks.data.contract import needed_columns

        columns = config.data.origins[source.origin].columns
        said = missing_column("prompt", "", frame, columns, needed_columns([*rewards]), source.origin)
        raise ConfigError(f"{source.key} {said}")
    values = frame.row(0, named=True)
    for reward in rewards:
        if reward.scores(values) and (missing := sorted(reward.columns.keys() - set(frame.columns))):
            raise ConfigError(
                f"reward {reward.name!r} needs {missing}: neither in its args nor a column of {source.key}, which has "
                f"{frame.columns}"
            )
    return values


def _batch(config: RunConfig, rewards: Sequence[Reward], row: int, texts: Sequence[str]) -> Batch:
    """Make a batch of these texts, as completions of a row of the training prompts."""
    if acting := [reward.name for reward in rewards if reward.needs_environments]:
        raise ConfigError(f"reward {acting[0]!r} reads `environments`: hold a conversation with `grpo env try` instead")
    values = read_row(config, rewards, row)
    completions = [completion_of(values["prompt"], text) for text in texts]
    return Batch([values] * len(texts), completions, _ids(config, rewards, texts))


def _ids(config: RunConfig, rewards: Sequence[Reward], texts: Sequence[str]) -> list[list[int]]:
    """Tokens of each text with the end token, if a reward may read them; else empty lists."""
    if not any(reward.accepts is None or "completion_ids" in reward.accepts for reward in rewards):
        return [[] for _ in texts]
    from tasks.data.lengths import load_tokenizer_and_context

    return ended_ids(load_tokenizer_and_context(config.model)[0], texts)


def _row_as_lines(row: Mapping[str, Any], rewards: Sequence[Reward]) -> list[str]:
    """The row's prompt and the columns that the rewards read, as lines of text."""
    own = [reward for reward in rewards if reward.scores(row)]
    read = dict.fromkeys(["prompt", *(column for reward in own for column in reward.columns)])
    return [f"{column}: {shortened(repr(row[column]))}" for column in read]


def rewards_table(rewards: Sequence[RewardConfig], given: np.ndarray, counts: np.ndarray, total: float) -> Table:
    by_name = {reward.name: value for reward, value in zip(rewards, given, strict=True)}
    table = Table("reward", "gives", "counts", "weight", "adds", "because", show_footer=True)
    table.columns[0].footer, table.columns[4].footer = "reward", _figure(total)
    for reward, value, count in zip(rewards, given, counts, strict=True):
        adds, why = _figure(reward.weight * count), "; ".join(_changes_of_value(reward, by_name))
        table.add_row(reward.name, _figure(value), _figure(count), f"{reward.weight:g}", adds, why)
    return table


def _changes_of_value(reward: RewardConfig, given: Mapping[str, float]) -> list[str]:
    """Reasons why the value that counts differs from the one that the reward gives."""
    if math.isnan(value := given[reward.name]):
        return ["does not apply (None)"]
    if reward.gate is not None and not (seen := given[reward.gate]) >= reward.gate_threshold:
        return [f"gate closed: {reward.gate} gives {_figure(seen)}, {reward.gate_threshold:g} is needed"]
    reasons = []
    if reward.clip and not reward.clip[0] <= value <= reward.clip[1]:
        reasons.append(f"clipped to {reward.clip[0]:g} … {reward.clip[1]:g}")
    if reward.clip and reward.normalize:
        reasons.append(f"{reward.clip[0]:g} … {reward.clip[1]:g} becomes 0 … 1")
    return reasons


def _figure(value: float) -> str:
    return "none" if math.isnan(value) else f"{value + 0.0:.6g}"  # + 0.0: no minus before a zero
