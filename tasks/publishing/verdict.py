"""Whether an export is worse than the trained policy that it was made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from grpo_core.config.evaluation import HELD_OUT
from tasks.rendering import figures

SAME = "the same files, byte for byte, as the trained policy that was evaluated: no further evaluation is needed"


def verdict(report: Mapping[str, Any], max_drop: float) -> tuple[bool, str]:
    """Whether an export is shown to keep `max_drop` on the held-out prompts, and a sentence about it. `report`: of
    `evaluate_exported`."""
    metric, found = report["metric"], report["sets"][HELD_OUT]
    difference, most = found["difference"], figures.size(report["metric"], max_drop)
    change = f"{metric} {figures.gain(metric, difference)} {figures.interval(metric, difference)}".rstrip()
    equal = f"{found['equal']:,} of {found['answers']:,} answers are the same"
    if not difference["num_units"]:
        return False, "not compared with the trained policy: no prompt was scored for both"
    if difference["low"] >= -max_drop:
        return True, f"not worse than the trained policy by more than {most}: {change}; {equal}"
    if difference["high"] < 0:
        return False, f"worse than the trained policy: {change}, and at most {most} may be lost; {equal}"
    return False, (
        f"not shown to lose at most {most}: {change} on {difference['num_units']:,} {found['units']}; {equal}. More "
        "held-out prompts narrow the interval"
    )


def rows(exports: Mapping[str, Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the stage's table, head first: each export on each evaluation set."""
    yield ["format", "set", "metric", "trained", "exported", "exported − trained", "same answers"]
    for made, export in exports.items():
        if not export["sets"]:
            yield [made, *["all"] * 2, *["the same files"] * 2, "0", "all"]
        for name, found in export["sets"].items():
            metric, difference = export["metric"], found["difference"]
            means = [figures.amount(metric, found[policy]) for policy in ("trained", "exported")]
            change = f"{figures.gain(metric, difference)} {figures.interval(metric, difference)}"
            yield [made, name, metric, *means, change, f"{found['equal']:,} of {found['answers']:,}"]
