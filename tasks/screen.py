"""Which prompts a run may use: all of its data held against the contract, with what breaks it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import polars as pl

from grpo_core import run_files
from grpo_core.config.inputs import DataChecks, DataSource
from grpo_core.config.run import RunConfig
from grpo_core.data.processor import load_processor, takes_images
from grpo_core.environments.setting import make_setting
from grpo_core.rewards.contract import Reward, check_environments, rewards_of
from tasks.data.contract import Part, check, needed_columns, wrong_columns
from tasks.data.groups import count_groups, group_problems
from tasks.data.images.columns import NAMES, column_problem
from tasks.data.images.numbering import have_images, number_images, refusals, unread
from tasks.data.images.tokenizer import with_column
from tasks.data.lengths import (
    ModelError,
    OptionsByEnvironment,
    beyond,
    embedding_rows,
    load_tokenizer_and_context,
    longest_shown,
    sample_lengths,
)
from tasks.data.own_schema import hold_against, load_schema
from tasks.data.path_or_hub import data_set
from tasks.data.repeats import NONE, keys_of
from tasks.data.rows import Rows
from tasks.data.sources import load_sources, pooled, sources_of, with_needed_columns, without_unstorable
from tasks.data.template_notes import template_notes
from tasks.reports.data_report import count_findings, count_shared, length_figures

FINDINGS_SHOWN = 10


@dataclass(frozen=True)
class Screened:
    """The prompts that training may use, the prompts that were dropped, and the findings."""

    kept: dict[str, Rows]
    dropped: dict[str, Rows]  # with `source_row` and `broken_rules` before their own columns
    shape: list[str]
    findings: pl.DataFrame
    lengths: dict[str, pl.Series]  # tokens of the kept prompts, or of a sample of them
    room: dict[str, int | None]  # longest allowed prompt, in tokens
    notes: list[str]  # about tokenizer and template
    report: dict[str, Any]

    @property
    def refused(self) -> bool:
        return bool(self.shape) or any(found["severity"] == "error" for found in self.report["findings"])


def screen(config: RunConfig, folder: Path | None = None) -> Screened:
    """Load the configured prompts and check them against the contract. `folder`: where their images are written, if
    they have any; default: nowhere. Raises SourceError, ModelError, RewardError, EnvironmentsError or ConfigError if
    prompts, model, rewards, environments or the model's processor cannot be loaded."""
    with tempfile.TemporaryDirectory(prefix="grpo-data-") as temporary:
        return _screen(config, (folder or Path(temporary)) / run_files.IMAGES)


def _screen(config: RunConfig, images: Path) -> Screened:
    rewards = rewards_of(config)
    check_environments(rewards, config.environment.is_used)
    checks = config.data.checks.model_dump()
    read = load_sources(config)
    broken, own = hold_against(read, load_schema(config.data.schema)) if config.data.schema else ([], NONE)
    parts = _parts(config, read, rewards)
    shape = wrong_columns(parts)  # said without the model, which takes seconds to load
    numbered, notes = None, []
    if not shape:
        rows = {name: part.rows for name, part in parts.items()}
        if have_images(rows) and takes_images(config.model):
            shape = [said for name, own in rows.items() if (said := column_problem(name, own.schema))]
            shape = shape or [*refusals(config)]
            if not shape:
                numbered = number_images(rows, sources_of(config), config.data, load_processor(config.model), images)
        else:
            rows, notes = unread(rows, config)
        parts = {name: replace(part, rows=rows[name]) for name, part in parts.items()}
        if numbered:
            parts = {name: _without_images(part, numbered.rows[name]) for name, part in parts.items()}
    if shape:
        shape = [*broken, *shape]
        report = _report(rewards, _by_part(config, read, read), read, read, shape, NONE, checks, config.teacher.columns)
        return Screened({}, {}, shape, NONE, {}, {}, [], report)
    tokenizer, positions = load_tokenizer_and_context(config.model, images=numbered is not None)
    if numbered:
        tokenizer, own = numbered.tokenizer, pl.concat([own, numbered.findings])
    evaluated = dict.fromkeys(config.evaluation_files.values(), config.evaluation_length)
    completion = {"train": config.rollout.max_completion_length, **evaluated}
    room = {name: positions and positions - length for name, length in completion.items()}
    for name, length in completion.items():
        if (left := room[name]) is not None and left < 1:
            raise ModelError(
                f"completions of {length} tokens ({name}) leave no room for a prompt: the model "
                f"{config.model.name_or_path!r} takes {positions} tokens (with RoPE of type dynamic or longrope: those "
                "before its frequencies change); lower max_completion_length"
            )
    parts = {name: replace(part, room=room[data_set(name)]) for name, part in parts.items()}
    dropping = [name for name, severity in checks.items() if severity == "drop"]
    options = template_options(config, tokenizer)
    shape, findings = check(parts, tokenizer, dropping, config.environment, options, own)
    shape = [*broken, *shape]
    rows = {name: without_unstorable(part.rows) for name, part in parts.items()}
    bad = {severity: _with_severity(severity, findings, checks) for severity in ("error", "drop")}
    dropped = {name: _dropped(own, bad["drop"].filter(dataset=name)) for name, own in rows.items()}
    kept = {name: _without(own, pl.concat(bad.values()).filter(dataset=name)) for name, own in rows.items()}
    if not shape and bad["error"].is_empty():
        shape = [
            f"{name} has no rows left: all {rows[name].height} were dropped"
            for name, own in kept.items()
            if not own.height
        ]
    by_part = _by_part(config, rows, kept)
    groups: dict[str, int] = {}
    if (column := config.evaluation.group_column) and not shape:
        shape = [*group_problems(column, parts, kept, bool(config.environment.factories))]
        groups = {} if shape else count_groups(column, kept)
    if not shape:
        rows, kept, dropped = pooled(rows), pooled(kept), pooled(dropped)
        shape = [*_promotion_overlaps(config, kept)]
    countable = {} if shape else {name: own for name, own in kept.items() if own.height}
    known, tokens = embedding_rows(config.model), 1 + max(tokenizer.get_vocab().values())
    unknown = (
        {name: beyond(known, own, tokenizer, options) for name, own in countable.items()} if tokens > known else {}
    )
    rows_of = f"the embedding of {config.model.name_or_path!r} has {known:,} rows, and its tokenizer {tokens:,} tokens"
    shape = [
        f"{name}: {count:,} prompts hold tokens that the model does not know: {rows_of}. Resize the model "
        "(resize_token_embeddings) and save it, or leave these tokens out"
        for name, count in unknown.items()
        if count
    ] or shape
    lengths = {name: sample_lengths(own, tokenizer, options) for name, own in countable.items()}
    more: dict[str, Any] = {"images": numbered.figures} if numbered else {}
    if config.teacher.template is not None and "train" in countable:
        more["longest_shown"] = longest_shown(countable["train"], config, tokenizer, options, positions)
    frames = (
        (frame["prompt"].head(1).to_list() for frame in countable["train"].slices()) if "train" in countable else ()
    )
    first = next((prompt for prompts in frames for prompt in prompts), None)
    notes += [] if first is None else template_notes(config, tokenizer, first, next(iter(options.values())))
    notes += [f"{rows_of}: a text with one of the others ends the training"] if tokens > known else []
    report = _report(rewards, by_part, rows, kept, shape, findings, checks, config.teacher.columns) | {
        "num_groups": groups,
        "lengths": length_figures(lengths, kept),
        "room": room,
        **more,
    }
    if numbered:
        kept, dropped = ({name: own.map(with_column) for name, own in sets.items()} for sets in (kept, dropped))
    return Screened(kept, dropped, shape, findings, lengths, room, notes, report)


def refusal(screened: Screened, where: str = "") -> str:
    """Write the refusal: the broken rules, the first rows that break them, `where` all of them are, and what to do."""
    counts = [found for found in screened.report["findings"] if found["severity"] == "error"]
    broken = [found["check"] for found in counts]
    places = screened.findings.filter(pl.col("check").is_in(broken)).head(FINDINGS_SHOWN)
    lines = [
        *screened.shape,
        *(f"{c['check']} ({c['column']} {c['rule']}): broken by {c['rows']} rows of {c['dataset']}" for c in counts),
        *(
            f"  {dataset} row {row}, {column}: {value!r} breaks {name}"
            for dataset, row, column, name, value, _ in places.rows()
        ),
    ]
    if counts:
        lines.append(
            f"{where}Correct the data, or choose to drop or keep such rows: "
            + ", ".join(f"data.checks.{name} = {_severity_choices(name)}" for name in dict.fromkeys(broken))
        )
    return "the data breaks its contract:\n" + "\n".join(lines)


def _by_part(config: RunConfig, rows: Mapping[str, Rows], kept: Mapping[str, Rows]) -> dict[str, dict[str, Any]]:
    return {
        name: {"rows_read": rows[name].height, "num_prompts": kept[name].height, "source": source.data}
        for name, source in sources_of(config).items()
    }


def _report(
    rewards: list[Reward],
    by_part: dict[str, dict[str, Any]],
    rows: Mapping[str, Rows],
    kept: Mapping[str, Rows],
    shape: list[str],
    findings: pl.DataFrame,
    checks: Mapping[str, str],
    shown: Sequence[str],
) -> dict[str, Any]:
    """What is known of data without the model."""
    return {
        "num_prompts": {name: own.height for name, own in kept.items()},
        "num_groups": {},
        "rows_read": {name: own.height for name, own in rows.items()},
        "parts": by_part,
        "columns": {
            "prompt": ["rollout"],
            **{name: list(readers) for name, readers in needed_columns(rewards, shown).items()},
        },
        "shape": shape,
        "findings": count_findings(findings, checks),
        "shared": count_shared(findings),
        "lengths": {},
        "room": {},
    }


def _parts(config: RunConfig, read: Mapping[str, Rows], rewards: Sequence[Reward]) -> dict[str, Part]:
    """Collect the rows of each part of the data, with the rewards and columns of their source."""
    sources, parts = sources_of(config), {}
    for name, rows in with_needed_columns(read, config).items():
        origin = config.data.origins[sources[name].origin]
        names = config.rewards_of(origin.name if isinstance(origin, DataSource) else None)
        own = [reward for reward in rewards if reward.name in names]
        shown = config.teacher.columns if data_set(name) == "train" else ()
        parts[name] = Part(rows, own, None, origin.columns, sources[name].origin, read[name].columns, shown)
    return parts


def _without_images(part: Part, numbered: Rows) -> Part:
    """The part with its images as numbers in the messages: no columns of images are left, and rewards that read them
    get them by these numbers."""

    def others(columns: Mapping[str, Any]) -> dict[str, Any]:
        return {name: it for name, it in columns.items() if name not in NAMES}

    rewards = [replace(it, columns=others(it.columns)) for it in part.rewards]
    return replace(part, rows=numbered, columns=others(part.columns), rewards=rewards)


def template_options(config: RunConfig, tokenizer: Any) -> OptionsByEnvironment:
    """Options of the chat template, by environment; the tools' schemas come from the process that imports the tools.
    Raises EnvironmentsError if environments or tools cannot be used with this model."""
    setting = make_setting(config, tokenizer)
    if setting is None:
        return {"": config.data.chat_template_kwargs}
    setting.environments.close()
    return {name: setting.options(name) for name in config.environment.factories or [""]}


def _promotion_overlaps(config: RunConfig, sets: Mapping[str, Rows]) -> Iterator[str]:
    """Yield a problem if the set that decides on a promotion shares prompts with the set by which training chooses its
    model."""
    if not (config.train.load_best_model_at_end or config.train.early_stopping_patience):
        return
    whole = bool(config.environment.factories)

    def keys(rows: Rows) -> pl.Series:
        return pl.concat(keys_of(frame, 0, whole)["overlap"] for frame in rows.slices())

    choosing = keys(sets["eval"])
    for name in dict.fromkeys([config.promotion.set, *(guard.set for guard in config.promotion.guards)]):
        judging = config.evaluation_files[name]
        if shared := int(keys(sets[judging]).is_in(choosing.implode()).sum()):
            yield (
                f"{shared:,} prompts of {judging} are in eval too: the training chooses its model by them, so they "
                f"cannot also decide on its promotion ({name!r}); leave them out of one of the two"
            )


def _dropped(rows: Rows, findings: pl.DataFrame) -> Rows:
    rules = (
        findings.group_by("row")
        .agg(broken_rules=pl.col("check").unique().sort().str.join(", "))
        .sort("row")
        .select(pl.col("row").alias("source_row"), "broken_rules")
    )
    earlier = [name for name in rules.columns if name in rows.columns]  # present if dropped rows are validated again

    def read() -> Iterator[pl.DataFrame]:
        for first, frame in rows.numbered():
            own = rules.filter(pl.col("source_row").is_between(first, first + frame.height, closed="left"))
            yield pl.concat([own, frame[own["source_row"] - first].drop(earlier)], how="horizontal")

    return Rows(pl.concat([rules.clear(), rows.empty.drop(earlier)], how="horizontal"), rules.height, read)


def _with_severity(severity: str, findings: pl.DataFrame, checks: Mapping[str, str]) -> pl.DataFrame:
    return findings.filter(pl.col("check").is_in([name for name, given in checks.items() if given == severity]))


def _without(rows: Rows, findings: pl.DataFrame) -> Rows:
    return rows.where(pl.repeat(True, rows.height, eager=True).scatter(findings["row"].drop_nulls().unique(), False))


def _severity_choices(name: str) -> str:
    allowed = get_args(DataChecks.model_fields[name].annotation)
    return " or ".join(repr(severity) for severity in allowed if severity != "error")
