"""An evaluation's report as sentences and table rows, for the terminal and for Prefect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tasks.rendering import figures as as_text


def verdicts(report: Mapping[str, Any], metric: str) -> list[str]:
    """Sentences on the metric: one per set and policy that the trained one is compared with."""
    return [
        f"{name}: {as_text.verdict(metric, differences[metric], other, as_text.unit(figures))}"
        for name, figures in report["sets"].items()
        for other, differences in figures["differences"].items()
    ]


def rows_of(figures: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield a set's report as the rows of a table, head first. One row per metric: its mean under each policy, then the
    trained policy minus each other one, in points if the metric is a share."""
    policies, differences = figures["policies"], figures["differences"]
    yield [
        "",
        *policies,
        *(f"trained − {other} [{d['accuracy']['confidence']:.0%}]" for other, d in differences.items()),
    ]
    for metric in policies["trained"]:
        means = [
            as_text.amount(metric, found[metric]["mean"]) if metric in found else "" for found in policies.values()
        ]
        gains = [found[metric] for found in differences.values()]
        changes = [f"{as_text.gain(metric, found)} {as_text.interval(metric, found)}" for found in gains]
        yield [metric, *means, *changes]
