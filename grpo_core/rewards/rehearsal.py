"""Run every reward on a few rows before the training: on the right answer, on nothing, on garbage.

Entry point: `python -m grpo_core.rewards.rehearsal CONFIG TRAIN.parquet OUTPUT.json`. A broken reward contract (a wrong
number of values, an exception, NaN, a value out of range, no end) is an error; anything that looks wrong is a warning.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_core.config.columns import ANSWER
from grpo_core.config.files import load_config
from grpo_core.config.inputs import RewardConfig
from grpo_core.config.run import RunConfig
from grpo_core.data.chat import completion_of, is_conversation, text_of
from grpo_core.errors import GrpoError, RewardError
from grpo_core.planning.plan import plan_inputs
from grpo_core.rewards.batch import Batch, short
from grpo_core.rewards.builtin.record import written
from grpo_core.rewards.contract import Reward, check_environments, rewards_of
from grpo_core.rewards.event_loop import GRACE
from grpo_core.rewards.isolated import START_SECONDS
from grpo_core.rewards.registry import BUILTIN
from grpo_core.rewards.scoring import score
from grpo_core.system.libraries import quiet_libraries
from grpo_core.system.processes import run_and_leave

if TYPE_CHECKING:
    from grpo_core.data.images import ImageFiles

ROWS = 8
FIRST_SECONDS = 60.0  # for one reward on one completion, with all that it imports or loads for that
SECONDS = 20.0  # for one reward on 3·ROWS completions after that
LOADING_SECONDS = 600.0  # for importing libraries and the rewards' modules, and for loading the tokenizer
TRYING = "trying the "  # begins the line that names what is being tried
# Unbalanced brackets, a number beyond any float, a format directive, a lost character: what breaks a careless parser.
GARBAGE = "]}) \\frac{1 <answer> 1e999 %s ,,\n-\ufffd </think> NaN '\""


def main() -> None:
    run("grpo_core.rewards.rehearsal", "Try the rewards on a few rows.", _on_first_rows)


def run(name: str, description: str, rehearsal: Callable[[RunConfig, Path], dict[str, Any]]) -> None:
    """Run a rehearsal as an entry point: it gets the configuration and the data's file, and returns the report."""
    parser = argparse.ArgumentParser(prog=name, description=description)
    parser.add_argument("config", type=Path)
    parser.add_argument("data", type=Path, help="validated training prompts (Parquet)")
    parser.add_argument("output", type=Path, help="where to write the report")
    arguments = parser.parse_args()
    quiet_libraries()
    try:
        report = rehearsal(load_config(arguments.config), arguments.data)
    except GrpoError as error:
        sys.exit(str(error))
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")


def _on_first_rows(config: RunConfig, data: Path) -> dict[str, Any]:
    from grpo_core.data.images import beside  # imports numpy, which commands that list rewards do without

    return rehearse(config, first_rows(config, data, ROWS), lambda: load_tokenizer(config), images=beside(data))


def first_rows(config: RunConfig, data: Path, count: int) -> list[dict[str, Any]]:
    """First rows of the data, equally many of each source."""
    import pyarrow.parquet as pq  # not pyarrow.dataset, which imports pandas

    names = config.evaluated_sources
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names or [""]}
    each = -(-count // len(found))
    with pq.ParquetFile(data) as file:
        for batch in file.iter_batches(batch_size=1024):
            sources = batch["source"].to_pylist() if names else [""] * batch.num_rows
            for place, name in enumerate(sources):
                if len(found[name]) < each:
                    found[name] += batch.slice(place, 1).to_pylist()
            if all(len(rows) == each for rows in found.values()):
                break
    return [row for rows in found.values() for row in rows]


def load_tokenizer(config: RunConfig) -> Any:
    """The model's tokenizer. Imports torch, which takes seconds."""
    from grpo_core.data import prompts

    return prompts.load_tokenizer(config.model)


def rehearse(
    config: RunConfig,
    rows: Sequence[Mapping[str, Any]],
    load_tokenizer: Callable[[], Any],
    begin: Callable[[Sequence[Mapping[str, Any]]], Sequence[Any]] | None = None,
    images: ImageFiles | None = None,
) -> dict[str, Any]:
    """Values of each reward per kind of completion, its pace, the rewards that gave only 0 and 1, and warnings.

    The tokenizer is loaded if a reward reads `completion_ids`. `begin`: starts a conversation for each row and returns
    its environment; a reward that reads environments judges acts, of which there are none here, rather than answers.
    Raises RewardError that names all rewards that fail.
    """
    resolved = rewards_of(config)
    check_environments(resolved, begin is not None)
    acting = [reward.name for reward in resolved if begin and reward.reads_environments]
    reads_ids = any(reward.accepts is None or "completion_ids" in reward.accepts for reward in resolved)
    kinds, batch = _rehearsed_batch(rows, load_tokenizer if reads_ids else None, begin)
    batch = replace(batch, images=images)
    rewards: dict[str, Any] = {}
    zero_or_one: list[str] = []
    errors, warnings = _gates(config.rewards, {reward.name: reward.range for reward in resolved})
    warnings += [
        f"reward {reward.name!r} has weight {reward.weight:g}: {record.if_weight_is_negative}"
        for reward in config.rewards
        if reward.weight < 0 and (record := BUILTIN.get(reward.function)) and record.if_weight_is_negative
    ]
    for declared, reward in zip(config.rewards, resolved, strict=True):
        print(f"{TRYING}reward {reward.name!r}", flush=True)
        try:
            values, seconds = _timed_values(reward, batch, _limits(declared))
        except RewardError as error:
            errors.append(str(error))
            continue
        if reward.name not in acting and (
            problem := reads_as_text(replace(reward, timeout=_limits(declared)[1]), batch, values)
        ):
            errors.append(problem)
            continue
        by_kind: dict[str, list[float]] = {kind: [] for kind in kinds}
        for kind, row, value in zip(kinds, batch.rows, values, strict=True):
            if reward.scores(row):
                by_kind[kind].append(value)
        rewards[reward.name] = {
            **{kind: _mean(given) for kind, given in by_kind.items()},
            "seconds_per_completion": seconds,
        }
        if all(value in (0, 1) or math.isnan(value) for value in values):
            zero_or_one.append(reward.name)
        if reward.name not in acting:
            warnings += _suspicions(reward, by_kind, config)
        warnings += _too_slow(reward, seconds * _completions_per_process(config))
        if all(map(math.isnan, values)):
            warnings.append(
                f"reward {reward.name!r} applies to none of the rehearsed completions: it gave only None"
                + "".join(f"; row 0 has {column} = {short(rows[0][column])}" for column in reward.columns)
            )
    if "right" in kinds and not errors and not acting and all(given["right"] is None for given in rewards.values()):
        errors += [
            f"no reward applies to the right answer of any of the first {len(rows)} rows, so nothing could be learnt "
            f"from them: the column {ANSWER!r} (data.columns.{ANSWER}) has to hold what the rewards take as an answer",
            *warnings,
        ]
    if errors:
        raise RewardError("\n".join(errors))
    return {"rows": len(rows), "rewards": rewards, "zero_or_one": zero_or_one, "warnings": warnings}


def _rehearsed_batch(
    rows: Sequence[Mapping[str, Any]],
    load_tokenizer: Callable[[], Any] | None,
    begin: Callable[[Sequence[Mapping[str, Any]]], Sequence[Any]] | None,
) -> tuple[list[str], Batch]:
    """Return completions of each kind and their kinds. Without a tokenizer they have no tokens, and without `begin` no
    environments."""
    tried = [("right", row, written(row[ANSWER])) for row in rows if isinstance(row.get(ANSWER), (str, int, float))]
    tried += [(kind, row, text) for kind, text in (("empty", ""), ("garbage", GARBAGE)) for row in rows]
    kinds, asked, texts = (list(column) for column in zip(*tried, strict=True))
    ids = load_tokenizer()(texts, add_special_tokens=False)["input_ids"] if load_tokenizer else [[] for _ in texts]
    completions = [completion_of(row["prompt"], text) for row, text in zip(asked, texts, strict=True)]
    return kinds, Batch(asked, completions, ids, begin(asked) if begin else ())


def _timed_values(reward: Reward, batch: Batch, limits: tuple[float, float]) -> tuple[list[float], float]:
    """Return the reward's values, and its seconds per completion. `limits`: on a first call, for one completion, and on
    the call for all of them."""
    first, then = (replace(reward, timeout=seconds) for seconds in limits)
    score([first], batch.scored_by(first).only(0))  # the pace does not include what is loaded once
    start = time.perf_counter()
    (values,) = score([then], batch)
    return values, (time.perf_counter() - start) / len(batch.rows)


def reads_as_text(reward: Reward, batch: Batch, values: Sequence[float]) -> str | None:
    """The error if the reward gives the same to all messages, and something else to their texts: `72 in completion` is
    never true of a list of messages, and raises nothing. `values`: those of the messages. Nothing is said of a reward
    that gives other values when it is asked again."""
    scored = {value for value in values if not math.isnan(value)}
    if len(scored) != 1 or not any(map(is_conversation, batch.completions)):
        return None
    texts = replace(batch, completions=[text_of(it) for it in batch.completions])
    try:
        if {value for value in score([reward], texts)[0] if not math.isnan(value)} <= scored:
            return None
        if not scored <= {*score([reward], batch)[0]}:
            return None
    except RewardError:
        return None
    return (
        f"reward {reward.name!r} gives {scored.pop():g} to {'everything' if len(values) > 1 else 'this'}, because it "
        "reads completions as text: here they are lists of messages, since the prompts are (or data.system_prompt "
        'makes them so); let it read completion[-1]["content"], which it tells apart'
    )


def longest_seconds(config: RunConfig) -> float:
    """Seconds after which the rehearsal must have ended if the rewards keep to their time limits: each call may take
    its limit, and as long again in the search for the completion that causes a failure."""
    limits = [(*_limits(reward), *[_limits(reward)[1]] * 2) for reward in config.rewards]  # the last: with text, again
    calls = sum(2 * (seconds + GRACE) for each in limits for seconds in each)
    starts = sum(4 * START_SECONDS for reward in config.rewards if reward.isolated)
    return LOADING_SECONDS + calls + starts


def _limits(reward: RewardConfig) -> tuple[float, float]:
    """Time limits, in seconds, of the first call and of the second."""
    record = BUILTIN.get(reward.function)
    if record and record.asks_a_model:
        return reward.timeout, reward.timeout
    return min(reward.timeout, FIRST_SECONDS), min(reward.timeout, SECONDS)


def _gates(
    rewards: Sequence[RewardConfig], ranges: Mapping[str, tuple[float, float] | None]
) -> tuple[list[str], list[str]]:
    """Errors about gates that are never or always open; warnings about gates that are better left closed."""
    errors: list[str] = []
    warnings: list[str] = []
    for reward in rewards:
        if reward.gate is None:
            continue
        if (seen := ranges[reward.gate]) and not seen[0] < reward.gate_threshold <= seen[1]:
            when = "always" if reward.gate_threshold <= seen[0] else "never"
            errors.append(
                f"reward {reward.name!r} counts where {reward.gate!r} gives {reward.gate_threshold:g} or more, which "
                f"is {when}: its range is {seen[0]:g} to {seen[1]:g}; set a gate_threshold above the lowest of these "
                "and up to the highest"
            )
        counts = (0.0, 1.0) if reward.normalize else reward.clip or ranges[reward.name] or (0.0, 0.0)
        if (least := min(reward.weight * bound for bound in counts)) < 0:
            warnings.append(
                f"reward {reward.name!r} adds {least:g} at the least, and 0 where its gate {reward.gate!r} is closed: "
                "completions that deserve a penalty are better off there; remove the gate, or clip and normalize the "
                "reward"
            )
    return errors, warnings


def _suspicions(reward: Reward, values: Mapping[str, Sequence[float]], config: RunConfig) -> list[str]:
    """Warnings about the values that a reward gave."""
    found = []
    scored = {value for given in values.values() for value in given if not math.isnan(value)}
    if len(scored) == 1 and ("right" in values or not reward.columns):
        found.append(
            f"reward {reward.name!r} gave {min(scored):g} to {_listed(values)} alike: if it does so for everything "
            "that the model writes, there is nothing to learn from it"
        )
    if reward.name in config.accuracy_rewards and scored and "right" in values and reward.columns:
        wrong = [row for row, value in enumerate(values["right"]) if value != 1]
        if wrong:
            found.append(
                f"reward {reward.name!r} says which answers are right, but gives {values['right'][wrong[0]]:g} to the "
                f"bare right answer of row {wrong[0]} (and to {len(wrong) - 1} more of {len(values['right'])}); fine "
                "if it asks for a form around the answer"
            )
    return found


def _too_slow(reward: Reward, seconds: float) -> list[str]:
    """A warning if one process's part of a generation batch takes longer than the timeout; `seconds`: at this pace."""
    if seconds <= reward.timeout:
        return []
    return [
        f"reward {reward.name!r} would take {seconds:.0f} s for a process's share of a generation batch at the "
        f"pace of this rehearsal; its timeout is {reward.timeout:g} s"
    ]


def _completions_per_process(config: RunConfig) -> int:
    inputs = plan_inputs(config, *(0 for _ in config.data.origins))
    return math.ceil(inputs.generation_batch / inputs.num_processes)


def _listed(kinds: Mapping[str, Any]) -> str:
    names = {"right": "the right answer", "empty": "an empty completion", "garbage": "garbage"}
    *first, last = (names[kind] for kind in kinds)
    return f"{', '.join(first)} and {last}"


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else None


if __name__ == "__main__":
    run_and_leave(main)
