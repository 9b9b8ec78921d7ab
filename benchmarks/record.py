"""The record of a comparison with TRL on one kind of hardware, and whether we have become slower than it says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cases import CASES
from benchmarks.picture import draw

SLOWER = 1.1  # times the record's figure: from here on a case fails
SAME_MACHINE = 0.25  # by which matrix products may differ; processors of one name can be of several kinds

Result = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """How a case compares with its record. `replaces`: it takes the record's place, since nothing speaks against it."""

    said: str
    is_slower: bool = False
    replaces: bool = True


def record_path(folder: Path, hardware: str) -> Path:
    return folder / f"{''.join(letter if letter.isalnum() else '-' for letter in hardware).strip('-').lower()}.json"


def read_record(path: Path) -> dict[str, Result]:
    """Cases by name; none without a file."""
    return {case["case"]: case for case in json.loads(path.read_text())["cases"]} if path.exists() else {}


def judge(now: Result, then: Result | None) -> Verdict:
    """Compare our figure with the record's. Seconds are first scaled to the same rate of matrix products, which each
    case measures before and after itself: the same processor is not equally fast every day."""
    if then is None:
        return Verdict("not in the record yet")
    ours, before = now["sides"]["ours"], then["sides"]["ours"]
    rate, rate_then = (median(each["calibration_gflops"]) for each in (now, then))
    rates = f"matrix products at {rate:,.0f} GFLOP/s, {rate_then:,.0f} then"
    if (now["workload"], now["unit"], ours["settings"]) != (then["workload"], then["unit"], before["settings"]):
        return Verdict(f"not compared with {then['date']}: another workload, or settings {before['settings']} then")
    ratio = ours["value"] / before["value"]
    said = f"{ours['value']:.3f} {now['unit']}, {before['value']:.3f} on {then['date']}: {ratio:.2f}×"
    if now["unit"] != "MiB":
        if not now["steady"]:
            return Verdict(f"not compared with {then['date']}: the machine is not steady", replaces=not then["steady"])
        if abs(rate / rate_then - 1) > SAME_MACHINE:
            return Verdict(f"not compared with {then['date']}: another machine of this name, {rates}")
        if not then["steady"]:
            return Verdict(f"not compared with {then['date']}: the machine was not steady then")
        ratio *= rate / rate_then
        said += f", and {ratio:.2f}× at the same rate ({rates})"
    if now["packages"] != then["packages"]:
        said += f"; then with {', '.join(f'{name} {version}' for name, version in then['packages'].items())}"
    return Verdict(said, is_slower=ratio > SLOWER, replaces=ratio <= SLOWER)


def save(measured: Sequence[tuple[Result, Verdict]], before: Mapping[str, Result], path: Path, hardware: str) -> None:
    """Write the record and its picture: the cases measured before, and those that replace them. If any does not, all
    that was measured is written beside the record."""
    _write({**before, **{result["case"]: result for result, verdict in measured if verdict.replaces}}, path, hardware)
    if not all(verdict.replaces for _, verdict in measured):
        _write({**before, **{result["case"]: result for result, _ in measured}}, beside(path), hardware)


def beside(path: Path) -> Path:
    """File of what was measured but is not the record."""
    return path.with_name(f"{path.stem}-not-recorded.json")


def _write(cases: Mapping[str, Result], path: Path, hardware: str) -> None:
    document = {"hardware": hardware, "cases": [cases[case.name] for case in CASES if case.name in cases]}
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps(document, indent=1) + "\n")
    temporary.rename(path)
    if document["cases"]:
        draw(document, path.with_suffix(".png"))
