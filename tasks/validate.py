"""The stage validate: checks data and rewards against the data contract, and refuses data that breaks it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prefect import get_run_logger, task
from prefect.client.schemas.objects import State

from grpo_core import run_files
from grpo_core.config.run import RunConfig
from grpo_core.data.prompts import load_tokenizer
from grpo_core.environments import rehearsal as with_environments
from grpo_core.evaluation.outcomes import bounds_of
from grpo_core.evaluation.statistics import BINARY, paired_difference
from grpo_core.rewards import rehearsal
from grpo_core.rewards.composition import range_of_sum
from tasks.data.demonstrations import write_demonstrations
from tasks.data.rows import Rows, write_rows
from tasks.processes.gpus.locks import one_free_gpu
from tasks.processes.run import TimeLimitError, run_process
from tasks.registry.feasible import impossible_rules, rules_beyond_size
from tasks.registry.gate import LEAST_UNITS
from tasks.registry.model_version import rehearse_version
from tasks.reports.data_report import FINDINGS, images_text, markdown, write_report
from tasks.screen import refusal, screen, template_options
from tasks.stages.errors import StageError
from tasks.stages.files import remove
from tasks.stages.run import Context, run_stage
from tasks.stages.table import VALIDATE
from tasks.tracking.artifacts import show_markdown

FEW_GROUPS = 50


@task(name="validate")
def validate(run: Path, config: RunConfig, force: bool = False) -> State[None]:
    return run_stage(VALIDATE, run, config, _work, force)


def _work(context: Context) -> dict[str, Any]:
    log = get_run_logger()
    rejected = context.run / "dataset.rejected"
    remove(rejected)
    if impossible := [*impossible_rules(context.config)]:
        raise StageError("no version could be promoted, whatever it learns:\n" + "\n".join(impossible))
    screened = screen(context.config, context.partial)
    report = screened.report
    if screened.refused:
        (context.partial / run_files.IMAGES).unlink(missing_ok=True)
        write_report(rejected, report, screened.findings, screened.lengths, screened.room)
        _show(report, markdown(report, screened.findings, rejected))
        raise StageError(refusal(screened, f"All of them: {rejected / FINDINGS}. "))
    write_report(context.partial, report, screened.findings, screened.lengths, screened.room)
    for name, rows in screened.kept.items():
        write_rows(rows, context.partial / f"{name}.parquet")
        log.info("%s: %d rows, columns %s", name, rows.height, ", ".join(rows.columns))
        if screened.dropped[name].height:
            write_rows(screened.dropped[name], context.partial / f"{name}.dropped.parquet")
    if "images" in report:
        log.info(images_text(report["images"]))
    if context.config.warm_start.source is not None:
        report["demonstrations"] = _demonstrations(context, screened.kept)
        log.info(demonstrations_text(report["demonstrations"]))
    for found in report["findings"]:
        done = {"warn": "kept", "drop": "dropped"}[found["severity"]]
        rule = f"{found['check']} ({found['column']} {found['rule']})"
        log.warning("%s: %d rows break %s; they are %s", found["dataset"], found["rows"], rule, done)
    rehearse_version(context.config, context.partial / "version")
    rehearsal = report["rehearsal"] = _rehearse(context)
    counts = report["num_prompts"] | {name: part["num_prompts"] for name, part in report["parts"].items()}
    metric = deciding_metric_of(context.config, rehearsal["zero_or_one"])
    counts |= report["num_groups"]
    files = {name: f"eval/{name}" for name in context.config.evaluated_sources} | context.config.evaluation_files
    units = {name: counts[file] for name, file in files.items()}
    rehearsal["warnings"] += [
        *screened.notes,
        *too_few_to_promote(context.config, metric, units),
        *rules_beyond_size(context.config, metric, units),
        *too_few_groups(context.config, report),
    ]
    for warning in rehearsal["warnings"]:
        log.warning(warning)
    _show(report, markdown(report, screened.findings, context.partial))
    return report


def _demonstrations(context: Context, kept: Mapping[str, Rows]) -> dict[str, Any]:
    """Write the demonstrations of the warm start, and return their sizes. Their prompts show the tools that the run's
    prompts show."""
    config = context.config
    by_environment = template_options(config, load_tokenizer(config.model)) if config.environment.is_used else {"": {}}

    def tools(row: Mapping[str, Any]) -> list[Any]:
        return by_environment.get(row.get("environment", ""), next(iter(by_environment.values()))).get("tools") or []

    held_out = {name: rows for name, rows in kept.items() if name in config.evaluation_files.values()}
    path = context.partial / f"{run_files.DEMONSTRATIONS}.parquet"
    return write_demonstrations(config, tools, held_out, path)


def demonstrations_text(found: Mapping[str, Any]) -> str:
    """Describe the demonstrations in a sentence."""
    dropped = f"; {found['dropped']:,} with a held-out prompt are left out" * bool(found["dropped"])
    return (
        f"{found['rows']:,} demonstrations of {found['mean']:.0f} tokens in the mean, {found['longest']:,} at most; "
        f"{found['trained_tokens']:,} tokens of the assistant are trained on{dropped}"
    )


def too_few_groups(config: RunConfig, report: Mapping[str, Any]) -> list[str]:
    """Warn of evaluation sets of so few groups that only large gains would be detected. `report`: of `screen`."""
    confidence = config.evaluation.confidence
    warnings = []
    for name, file in config.evaluation_files.items():
        count = report["num_groups"].get(file, FEW_GROUPS)
        if count < FEW_GROUPS:
            least = paired_difference(np.ones(count), np.ones(count), confidence, BINARY).minimum_detectable
            warnings.append(
                f"{name}: {report['num_prompts'][file]:,} prompts are {count:,} groups "
                f"(evaluation.group_column = {config.evaluation.group_column!r}), and the groups count: even if "
                f"policies hardly differ, a gain in accuracy of less than {100 * least:.0f} points would not be shown "
                "reliably. Add groups rather than prompts"
            )
    return warnings


def deciding_metric_of(config: RunConfig, zero_or_one: Sequence[str]) -> str:
    """The metric that will decide on promotions. `zero_or_one`: the rewards that gave only 0 and 1 in the rehearsal."""
    return config.promotion.metric or ("accuracy" if {*config.accuracy_rewards} <= {*zero_or_one} else "reward")


def too_few_to_promote(config: RunConfig, metric: str, num_units: Mapping[str, int]) -> list[str]:
    """Warn if no promotion will be possible because versions are compared by a reward of unknown range, on too few
    prompts or groups. `metric`, `num_units`: as in `rules_beyond_size`."""
    held_out, unit = num_units[config.promotion.set], "groups" if config.evaluation.group_column else "prompts"
    if held_out >= LEAST_UNITS or all(map(math.isfinite, bounds_of(metric, config))):
        return []
    unbounded = [repr(it.name) for it in config.rewards if not all(map(math.isfinite, range_of_sum([it])))]
    return [
        f"versions are compared by their mean reward, but the range of {', '.join(unbounded)} is unknown: with "
        f"{held_out:,} {unit} in {config.promotion.set!r} none can be promoted. Hold out {LEAST_UNITS} {unit} or "
        "more, or give each such reward its range = [lowest, highest], or a clip"
    ]


def _show(report: dict[str, Any], page: str) -> None:
    groups = {name: f" in {count:,} groups" for name, count in report["num_groups"].items()}
    prompts = ", ".join(f"{name} {count:,}{groups.get(name, '')}" for name, count in report["num_prompts"].items())
    broken = len({finding["check"] for finding in report["findings"]})
    description = f"Prompts kept: {prompts}. Rules broken: {broken or 'none'}"
    show_markdown("data-report", page, description)


def _rehearse(context: Context) -> dict[str, Any]:
    """Try environments, tools and rewards on a few rows, in a separate process: they are other people's code. If the
    machine has GPUs, they see one that is free, or none."""
    output = context.partial / "rehearsal.json"
    paths = (context.run / run_files.CONFIG, context.partial / "train.parquet", output)
    log, last = get_run_logger(), ""

    def on_line(line: str) -> None:
        nonlocal last
        last = line if line.startswith(rehearsal.TRYING) else last
        log.info(line)

    tried = with_environments if context.config.environment.is_used else rehearsal
    limit = tried.longest_seconds(context.config)
    try:
        with one_free_gpu() as none_free:
            if none_free:
                log.warning("rewards and environments are tried without a GPU, since none is free: %s", none_free)
            run_process(["-m", tried.__name__, *map(str, paths)], on_line, limit=limit)
    except TimeLimitError as error:
        raise StageError(
            f"the rehearsal was ended after {limit:g} s, {last or 'loading'}, which ignores its own time limit: it "
            "must neither catch every exception nor wait in compiled code; or set isolated = true, so that it is "
            f"killed in time.\n{error}"
        ) from error
    report = json.loads(output.read_text())
    output.unlink()
    return report
