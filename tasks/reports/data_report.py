"""Writes the data report of validate: figures, a picture of the prompt lengths and a table, as files and in Prefect."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from grpo_core import run_files
from tasks.data.contract import RULES
from tasks.data.repeats import SHOWN
from tasks.data.rows import Rows
from tasks.rendering.drawing import draw_lengths
from tasks.rendering.markdown import escape, table

FINDINGS, PICTURE = "findings.csv", "lengths.png"
FINDINGS_IN_TABLE = 100


def count_findings(findings: pl.DataFrame, checks: Mapping[str, str]) -> list[dict[str, Any]]:
    """Severity of each broken rule, and number of rows per dataset that break it."""
    if findings.is_empty():
        return []
    counts = findings.group_by("check", "dataset", "column").len("rows").sort("check", "dataset", "column")
    return [{**row, "severity": checks[row["check"]], "rule": RULES[row["check"]]} for row in counts.to_dicts()]


def count_shared(findings: pl.DataFrame) -> list[dict[str, Any]]:
    """Number of prompts of one part of the data that are also in another, by rule."""
    shared = findings.filter(pl.col("other") != pl.col("dataset"))
    return shared.group_by("dataset", "other", "check").len("rows").sort("dataset", "other", "check").to_dicts()


def length_figures(lengths: Mapping[str, pl.Series], kept: Mapping[str, Rows]) -> dict[str, dict[str, Any]]:
    """Tokens per prompt: mean, median, 95th percentile and maximum of the prompts that were tokenized."""
    return {
        name: {
            "tokenized": len(values),
            "of": kept[name].height,
            "mean": values.mean(),
            "median": values.median(),
            "p95": values.quantile(0.95),
            "max": values.max(),
        }
        for name, values in lengths.items()
    }


def write_report(
    folder: Path,
    report: Mapping[str, Any],
    findings: pl.DataFrame,
    lengths: Mapping[str, pl.Series],
    room: Mapping[str, int | None],
) -> None:
    """Write report.json, findings.csv (one row per broken rule) and lengths.png into a folder."""
    folder.mkdir(exist_ok=True)
    (folder / run_files.REPORT).write_text(json.dumps(report, indent=2) + "\n")
    findings.write_csv(folder / FINDINGS)
    if lengths:
        (folder / PICTURE).write_bytes(draw_lengths(lengths, room))


def markdown(report: Mapping[str, Any], findings: pl.DataFrame, folder: Path) -> str:
    """Write the report as Markdown, for Prefect."""
    parts = ["# Data report", *(f"**{escape(problem)}**" for problem in report["shape"])]
    datasets = [
        (name, f"{part['rows_read']:,}", f"{part['num_prompts']:,}", part["source"])
        for name, part in report["parts"].items()
    ]
    parts.append(table([("dataset", "rows read", "prompts kept", "source"), *datasets]))
    if report["findings"]:
        rows = [
            (f["check"], f["severity"], f"{f['rows']:,}", f["dataset"], f"{f['column']} {f['rule']}")
            for f in report["findings"]
        ]
        parts += ["## Rules broken", table([("check", "severity", "rows", "dataset", "rule"), *rows])]
        if report["shared"]:
            pairs = [(it["dataset"], it["other"], it["check"], f"{it['rows']:,}") for it in report["shared"]]
            parts += ["## Prompts of two data sets", table([("dataset", "is also in", "check", "rows"), *pairs])]
        listed = findings.head(FINDINGS_IN_TABLE).drop("other")
        parts.append(table([listed.columns, *(tuple(map(_shown, row)) for row in listed.rows())]))
        if findings.height > FINDINGS_IN_TABLE:
            parts.append(f"… {findings.height - FINDINGS_IN_TABLE:,} more in {escape(str(folder / FINDINGS))}")
    if images := report.get("images"):
        parts += ["## Images", images_text(images)]
    if report["lengths"]:
        picture = base64.b64encode((folder / PICTURE).read_bytes()).decode()
        parts += ["## Prompt lengths", f"![prompt lengths](data:image/png;base64,{picture})"]
    if rehearsal := report.get("rehearsal"):
        if "environments" in rehearsal:
            parts += ["## Environments and tools", _environments_table(rehearsal["environments"])]
        parts += ["## Reward rehearsal", f"Mean reward over {rehearsal['rows']} rows.", _rehearsal_table(rehearsal)]
        parts += [f"- {escape(warning)}" for warning in rehearsal["warnings"]]
    return "\n\n".join(parts) + "\n"


def images_text(images: Mapping[str, Any]) -> str:
    """Describe the images of a run's data in a sentence."""
    tokens, (width, height) = images["tokens"], images["largest"]
    return (
        f"{images['count']:,} different images, {images['bytes'] / 2**20:,.1f} MiB, the largest {width:,} × {height:,} "
        f"pixels, in {tokens['min']:,} to {tokens['max']:,} tokens each, {tokens['mean']:,.1f} in the mean"
    )


def _rehearsal_table(rehearsal: Mapping[str, Any]) -> str:
    kinds = [kind for kind in next(iter(rehearsal["rewards"].values())) if kind != "seconds_per_completion"]
    rows = [
        (name, *(_number(given[kind]) for kind in kinds), f"{1000 * given['seconds_per_completion']:.2f} ms")
        for name, given in rehearsal["rewards"].items()
    ]
    return table([("reward", *kinds, "per completion"), *rows])


def _environments_table(environments: Mapping[str, Any]) -> str:
    """Table of each environment's figures on a few rows."""
    rows = [
        (name, str(found["rows"]), what, f"{part['seconds']:.3f} s", f"{part['tokens']:,}", f"{part['raised']:,}")
        for name, found in environments.items()
        for what, part in {"reset": found["reset"], "get_reward": found["get_reward"], **found["tools"]}.items()
    ]
    return table([("environment", "rows", "asked", "mean time", "most tokens", "calls that raised"), *rows])


def _number(value: float | None) -> str:
    return "does not apply" if value is None else f"{value:.3g}"


def _shown(value: Any) -> str:
    text = "" if value is None else repr(value) if isinstance(value, str) and value != value.strip() else str(value)
    return text[: SHOWN + 40]
