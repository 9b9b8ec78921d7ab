"""Selects rollouts of a training for people to read, adds what is shown with each, and renders them as one page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import polars as pl

from grpo_core import run_files
from grpo_core.config.run import RunConfig
from grpo_core.data.images import ImageFiles, beside, in_words
from tasks.data.completions import (
    PLACE,
    NoRolloutsError,
    prompts_of,
    read_figures,
    read_rows,
    recorded_batches,
    with_text,
)
from tasks.processes.gpus.locks import one_free_gpu
from tasks.rendering import drawing, figures
from tasks.rendering.drawing import BLUE, GREY, ORANGE
from tasks.rendering.page import Chart, Section, Table, render
from tasks.rendering.visible import shortened
from tasks.reports.conversations import TURNS, pictures_of, trained_on
from tasks.reports.tokens import COLOURED_BY, COMPUTED, Piece, coloured_pieces
from tasks.stages.condition import MARKER, identity
from tasks.stages.files import read_json
from tasks.stages.run_directory import read_config
from tasks.stages.table import TRAIN, VALIDATE

Order = Literal["worst", "best", "longest", "step"]
ORDERS: tuple[Order, ...] = get_args(Order)
STEPS = re.compile(r"(\d+)(?:-(\d+))?")
PROMPTS_SHOWN = 5
ON_DEMAND = " or ".join(f"--colour {name}" for name in COMPUTED) + " colours tokens by figures of the trained policy."
LONGEST_PROMPT = 80  # characters of a prompt in a list


@dataclass(frozen=True)
class Rollouts:
    """The selected rollouts of a run. `figures`: of all that match; `rows`: complete rows of the first of them;
    `recorded`: number of rollouts that the training has sampled so far; `prompt`: the row of train.parquet to which all
    belong, or None; `images`: those of the prompts that it was sampled for, None if there are none."""

    config: RunConfig
    order: Order
    figures: pl.DataFrame
    rows: list[dict[str, Any]]
    recorded: int
    prompt: int | None = None
    images: ImageFiles | None = None

    @property
    def colours(self) -> dict[str, str]:
        """Figures by which the tokens can be coloured: name → meaning."""
        kept = {"age": "ages", **dict.fromkeys(COMPUTED, "trained_logprobs")}
        return {
            name: meaning
            for name, meaning in COLOURED_BY.items()
            if name not in kept or any(row.get(kept[name]) for row in self.rows)
        }

    @property
    def summary(self) -> str:
        kinds = {"worst": "worst first", "best": "best first", "longest": "longest first", "step": "in their order"}
        fit = self.figures.height
        those = f"{fit:,}" if fit == self.recorded else f"{fit:,} that match (of {self.recorded:,})"
        return f"{len(self.rows):,} of {those} rollouts, {kinds[self.order]}."


def choose_rollouts(
    run: Path,
    order: Order = "worst",
    limit: int = 5,
    reward: str | None = None,
    steps: str | None = None,
    text: str | None = None,
    prompt: str | None = None,
) -> Rollouts:
    """Select rollouts of a run's training, which may still be under way.

    order: worst and best are by reward; equal ones by advantage, then the newer first. reward: name of the reward to
    use instead of the weighted sum. steps: `N` or `N-M`, the updates for which they were sampled. text: text that the
    prompt or completion has to contain. prompt: row of a prompt in train.parquet, or text that only this prompt
    contains.

    Raises NoRolloutsError if there are none, or if the reward, the steps or the prompt do not exist.
    """
    config = read_config(run)
    names = [it.name for it in config.rewards]
    if reward is not None and reward not in names:
        raise NoRolloutsError(f"run {run.name!r} has no reward {reward!r}; its rewards: {', '.join(names)}")
    training = TRAIN.path(run) if TRAIN.path(run).is_dir() else TRAIN.partial(run)
    files = recorded_batches(training)
    if not files:
        raise NoRolloutsError(
            f"run {run.name!r} has sampled nothing yet ({training / 'completions'} is empty); "
            f"`grpo status {run.name}` shows its progress"
        )
    found = read_figures(files, config.rewards)
    recorded, last = found.height, max(found["step"].to_list(), default=0)
    row = None if prompt is None else _find_prompt(prompt, files)
    if row is not None:
        found = found.filter(row=row)
    if steps is not None:
        found = found.filter(pl.col("step").is_between(*_read_steps(steps)))
    if text:
        found = with_text(files, found, text)
    if found.is_empty():
        raise NoRolloutsError(
            f"none of the {recorded:,} rollouts, of updates 1 to {last}, matches; give fewer conditions"
        )
    found = _sorted(found, order, f"rewards/{reward}" if reward else "reward")
    return Rollouts(config, order, found, read_rows(files, found.head(limit)), recorded, row, _images(run, training))


def _images(run: Path, training: Path) -> ImageFiles | None:
    """The images of the prompts; None if there are none, or those of other prompts, validated since."""
    then = read_json(training / MARKER).get("made_from", {}).get(VALIDATE.name)
    now = VALIDATE.read_receipt(run)
    return beside(run_files.prompts(run, "train")) if then == identity(now, [*(then or ())]) else None


def _sorted(found: pl.DataFrame, order: Order, by: str) -> pl.DataFrame:
    value, advantage = pl.col(by).cast(pl.Float64).fill_nan(None), pl.col("advantage").fill_nan(None)
    newest = [pl.col("step"), *map(pl.col, PLACE)]
    if order == "step":
        return found.sort(newest)
    if order == "longest":
        return found.sort(pl.col("completion_tokens"), *newest, descending=[True, True, True, False])
    best = order == "best"
    return found.sort(value, advantage, *newest, descending=[best, best, True, True, False], nulls_last=True)


def _read_steps(steps: str) -> tuple[int, int]:
    match = STEPS.fullmatch(steps.strip())
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise NoRolloutsError(f"--step {steps}: give an update such as 40, or a first and a last one such as 40-60")
    return int(match[1]), int(match[2] or match[1])


def _find_prompt(prompt: str, files: Sequence[Path]) -> int:
    """Find the row of a sampled prompt by its number, or by text that no other prompt contains."""
    there = prompts_of(files)
    if prompt.isdecimal() and int(prompt) in there:
        return int(prompt)
    exact = [row for row, text in there.items() if text.strip() == prompt.strip()]
    found = exact or [row for row, text in there.items() if prompt.lower() in text.lower()]
    if len(found) == 1:
        return found[0]
    shown = ", ".join(f"{row} ({shortened(there[row], LONGEST_PROMPT)!r})" for row in sorted(found)[:PROMPTS_SHOWN])
    raise NoRolloutsError(
        f"--prompt {shortened(prompt, LONGEST_PROMPT)!r}: "
        + (
            f"{len(found):,} prompts contain it; name one by its row: {shown}"
            if found
            else f"none of the {len(there):,} prompts sampled so far has this row or contains this text"
        )
    )


def by_step(rollouts: Rollouts) -> Table:
    """Table of the followed prompt's figures per update: completions, mean and best reward, length."""
    rows = [
        [
            f"{it['step']}",
            f"{it['count']}",
            _number(it["mean"]),
            _number(it["best"]),
            figures.number(it["length"]),
            figures.percent(it["cut"]),
        ]
        for it in _per_step(rollouts).iter_rows(named=True)
    ]
    return Table(["update", "completions", "mean reward", "best", "tokens, mean", "cut off"], rows)


def _per_step(rollouts: Rollouts) -> pl.DataFrame:
    reward = pl.col("reward").fill_nan(None)
    return (
        rollouts.figures.group_by("step")
        .agg(
            count=pl.len(),
            mean=reward.mean(),
            best=reward.max(),
            worst=reward.min(),
            length=pl.col("completion_tokens").mean(),
            cut=pl.col("truncated").mean(),
        )
        .sort("step")
    )


def _number(value: float | None) -> str:
    return figures.NONE if value is None else figures.number(value)


def with_trained_policy(run: Path, rollouts: Rollouts) -> Rollouts:
    """Add `trained_logprobs` and `entropies` to the rollouts: figures of each token under the trained policy, which is
    loaded for that, onto a GPU if one is free. Raises NoRolloutsError if there is no trained policy yet."""
    from grpo_core.evaluation.token_figures import token_figures  # imports torch

    model = TRAIN.path(run) / run_files.MODEL
    if not model.is_dir():
        raise NoRolloutsError(
            f"run {run.name!r} has no trained policy yet ({model}), from which {' and '.join(COMPUTED)} are computed; "
            "colour by advantage or surprise until its training is done"
        )
    samples = [(row["prompt_ids"], row["completion_ids"]) for row in rollouts.rows]
    with one_free_gpu():
        found = token_figures(model, samples, rollouts.config.rollout.temperature)
    rows = [
        {**row, "trained_logprobs": logprobs, "entropies": entropies}
        for row, (logprobs, entropies) in zip(rollouts.rows, found, strict=True)
    ]
    return replace(rollouts, rows=rows)


def pieces_of(rollouts: Rollouts, tokenizer: Any) -> list[list[Piece]]:
    """Colour the tokens of each rollout; the largest value among these rollouts gets the strongest shade."""
    advantages = [abs(row["advantage"]) for row in rollouts.rows if row["advantage"] == row["advantage"]]
    ages = [max(row["ages"]) for row in rollouts.rows if row.get("ages")]
    strongest = {"advantage": max(advantages, default=0.0), "age": float(max(ages, default=0))}
    return [coloured_pieces(row, tokenizer, strongest) for row in rollouts.rows]


def rollouts_page(rollouts: Rollouts, tokenizer: Any = None, colour: str = "", note: str = "") -> str:
    """Render the rollouts as a self-contained HTML page. tokenizer: decodes their tokens; None shows no tokens. colour:
    initial colouring. note: reason why there are no tokens."""
    config = rollouts.config
    pieces = pieces_of(rollouts, tokenizer) if tokenizer is not None else [[] for _ in rollouts.rows]
    pictures = pictures_of(rollouts.images)
    samples = [
        trained_on(row, f"update {row['step']}", of_row, pictures)
        for row, of_row in zip(rollouts.rows, pieces, strict=True)
    ]
    on_demand = "" if {*COMPUTED} <= {*rollouts.colours} else ON_DEMAND
    title = "Rollouts" if rollouts.prompt is None else f"Prompt {rollouts.prompt} over the training"
    sections = [
        *([_followed(rollouts)] if rollouts.prompt is not None else []),
        Section(
            title if rollouts.prompt is None else "Its rollouts",
            f"{rollouts.summary} {note or on_demand}",
            legend=TURNS if config.environment.is_used else {},
            colours=rollouts.colours if tokenizer is not None else {},
            colour=colour,
            rollouts=samples,
        ),
    ]
    return render(f"{config.name} · {title[0].lower()}{title[1:]}", config.model.name_or_path, [], sections)


def _followed(rollouts: Rollouts) -> Section:
    table, steps = by_step(rollouts), _per_step(rollouts)
    lines: dict[str, Any] = {name: steps.select("step", name).drop_nulls().rows() for name in ("mean", "best", "worst")}
    charts = []
    if lines["mean"]:
        picture = drawing.svg(lambda axes: drawing.plot(axes, lines, [BLUE, GREY, ORANGE], smooth=False))
        charts = [Chart("Reward", picture, "of its completions, at each update that sampled it")]
    sampled = f"Sampled for {len(table.rows):,} updates, {rollouts.figures.height:,} completions."
    return Section(f"Prompt {rollouts.prompt} over the training", sampled, charts=charts, tables=[table])


def with_images_in_words(rollouts: Rollouts) -> list[dict[str, Any]]:
    """The rows for readers of text, with the sizes of the images in their prompts if these are at hand."""
    files = rollouts.images
    sizes = [files.sizes(row["images"]) if files and "images" in row else [] for row in rollouts.rows]
    return [row | {"prompt": in_words(row["prompt"], of)} for row, of in zip(rollouts.rows, sizes, strict=True)]


def describe(row: Mapping[str, Any]) -> str:
    """Describe a rollout in one line: update, prompt, reward, advantage, length."""
    cut = ", cut off" if row["truncated"] else ""
    return (
        f"update {row['step']} · prompt {row['row']} · reward {figures.number(row['reward'])} · "
        f"advantage {figures.number(row['advantage'])} · {row['completion_tokens']:,} tokens{cut}"
    )
