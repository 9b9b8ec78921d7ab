"""make bench beside the record of the same processor: what fails, what is only recorded, and what stays; and what both
sides of the comparison with TRL need, on a machine with little more than PyTorch."""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import vs_trl
from benchmarks.cases import GATED, Case
from benchmarks.command import ROOT
from benchmarks.record import Verdict, judge, read_record, record_path, save
from benchmarks.workload import write

HARDWARE = "2 cores of Example Processor"


def measured(case: str = "training", value: float = 1.0, rate: float = 1000.0, **changes: Any) -> dict[str, Any]:
    """A case as it is measured: ours takes `value` where matrix products run at `rate` GFLOP/s."""
    workload = {"mode": "replay", "hidden": 256}
    sides = {"ours": {"value": value, "lowest": value, "highest": value, "settings": {"precision": "no"}}}
    sides |= {side: {**sides["ours"], "value": 3.0, "settings": {"rows": 8}} for side in ("TRL default", "TRL tuned")}
    result = {"case": case, "date": "2026-01-02", "packages": {"torch": "2.13.0", "trl": "1.16.0"}, "about": case}
    result |= {
        "unit": "s a step",
        "workload": workload,
        "sides": sides,
        "ratios": {"TRL default": 3.0, "TRL tuned": 3.0},
    }
    result |= {"gates": {}, "goals": {}, "met": True, "utilisation": None, "token_step_ms": None}
    return {**result, "calibration_gflops": [rate, rate], "steady": True, **changes}


RECORDED = measured(date="2025-11-21")
OTHER_PRECISION = {**RECORDED["sides"], "ours": {**RECORDED["sides"]["ours"], "settings": {"precision": "bf16"}}}
KEPT = Verdict("", replaces=False)


@pytest.mark.parametrize(
    ("now", "then", "expected", "said"),
    [
        (measured(), None, Verdict(""), "not in the record"),
        (measured(value=1.09), RECORDED, Verdict(""), "1.090 s a step, 1.000 on 2025-11-21: 1.09×"),
        (measured(value=1.11), RECORDED, Verdict("", is_slower=True, replaces=False), "1.11×, and 1.11× at the same"),
        (
            measured(value=1.2, rate=850),
            RECORDED,
            Verdict(""),
            "1.20×, and 1.02× at the same rate (matrix products at 850",
        ),
        (measured(value=1, rate=1200), RECORDED, Verdict("", True, False), "1.00×, and 1.20× at the same rate"),
        (measured(value=9, rate=1300), RECORDED, Verdict(""), "another machine of this name"),
        (measured(value=9, rate=500, steady=False), RECORDED, KEPT, "the machine is not steady"),
        (measured(value=9), {**RECORDED, "steady": False}, Verdict(""), "was not steady then"),
        (measured(value=9, workload={"mode": "generate"}), RECORDED, Verdict(""), "another workload"),
        (measured(value=9, sides=OTHER_PRECISION), RECORDED, Verdict(""), "{'precision': 'no'} then"),
        (
            measured(value=1.2, rate=10, steady=False, unit="MiB"),
            {**RECORDED, "unit": "MiB"},
            Verdict("", True, False),
            "1.200 MiB, 1.000 on 2025-11-21: 1.20×",
        ),
        (measured(packages={"torch": "2.14.0"}), RECORDED, Verdict(""), "then with torch 2.13.0, trl 1.16.0"),
    ],
)
def test_our_figure_is_compared_with_the_record_where_the_two_can_be_compared(
    now: dict[str, Any], then: dict[str, Any] | None, expected: Verdict, said: str
) -> None:
    verdict = judge(now, then)
    assert (verdict.is_slower, verdict.replaces) == (expected.is_slower, expected.replaces)
    assert said in verdict.said


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where results are written; only the measurements of `make bench` are replaced."""
    monkeypatch.setattr(vs_trl, "hardware", lambda: HARDWARE)
    monkeypatch.setattr(vs_trl, "wait_until_quiet", lambda: None)
    monkeypatch.setattr(vs_trl, "tune", lambda workload: ({}, []))
    return tmp_path / "results"


def bench(folder: Path, monkeypatch: pytest.MonkeyPatch, *results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Run `make bench` where these are the measurements; the record that it leaves."""
    found = {result["case"]: result for result in results}
    monkeypatch.setattr(vs_trl, "compare", lambda case, *_: found[case.name])
    monkeypatch.setattr(sys, "argv", ["vs_trl", "--output", str(folder), "--only", *found])
    try:
        vs_trl.main()
    finally:
        cases = json.loads(record_path(folder, HARDWARE).read_text())["cases"]
    return {case["case"]: case for case in cases}


@pytest.mark.slow
def test_a_slower_case_fails_with_both_figures_and_the_date_and_leaves_its_record(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = bench(folder, monkeypatch, measured("tiny"), measured("training", date="2025-11-21"))
    assert {name: case["sides"]["ours"]["value"] for name, case in first.items()} == {"tiny": 1.0, "training": 1.0}
    faster, slower, new = measured("tiny", 0.9), measured("training", 1.25), measured("memory", 5.0)
    with pytest.raises(SystemExit) as failed:
        bench(folder, monkeypatch, faster, slower, new)
    assert isinstance(failed.value.code, str), "status 1"
    line, kept = failed.value.code.splitlines()
    assert line.startswith("training is slower: 1.250 s a step, 1.000 on 2025-11-21: 1.25×, and 1.25× at the same rate")
    path = record_path(folder, HARDWARE)
    record, beside = (
        json.loads(file.read_text())["cases"] for file in (path, folder / f"{path.stem}-not-recorded.json")
    )
    assert str(folder / f"{path.stem}-not-recorded.json") in kept
    assert [(case["case"], case["sides"]["ours"]["value"]) for case in record] == [
        ("tiny", 0.9),
        ("training", 1.0),
        ("memory", 5.0),
    ]
    assert beside == [faster, slower, new]
    assert path.with_suffix(".png").stat().st_size and "SLOWER" in capsys.readouterr().out


@pytest.mark.slow
def test_cases_that_are_not_measured_again_stay_in_the_record(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench(folder, monkeypatch, *(measured(case.name) for case in GATED))
    found = bench(folder, monkeypatch, measured("training", 0.8, packages={"torch": "2.14.0", "trl": "1.17.0"}))
    assert [*found] == [case.name for case in GATED]
    assert [name for name, case in found.items() if case["packages"]["torch"] == "2.14.0"] == ["training"]


@pytest.mark.parametrize("case", GATED, ids=lambda case: case.name)
def test_a_case_is_compared_with_what_was_read_from_its_record(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the measurement on all is real; a case whose workload differed from its own record would replace it."""
    step = {"reward": 1.0, "time/generate": 0.1, "completions/max_length": 8}
    took = iter(range(1, 100))

    def run(*_: Any) -> dict[str, Any]:
        slower = next(took) * 1.0
        return {"seconds": [slower] * 60, "metrics": [step] * 60, "peak_mib": slower * 100, "before_mib": 10.0}

    monkeypatch.setattr(vs_trl, "run", run)
    monkeypatch.setattr(vs_trl, "calibrate", lambda *_: 1000.0)
    monkeypatch.setattr(vs_trl, "version", lambda package: "1.0")  # TRL comes with `make peer`
    monkeypatch.setattr(vs_trl, "write", lambda *_: None)
    path = record_path(tmp_path, HARDWARE)
    first, again = (vs_trl.compare(case, {"precision": "no", "rows": 8}, [], 64) for _ in range(2))
    save([(first, judge(first, None))], {}, path, HARDWARE)
    verdict = judge(again, read_record(path)[case.name])
    assert verdict.is_slower and not verdict.replaces, verdict.said


def test_a_missed_gate_fails_and_is_recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"^training misses a gate$"):
        bench(folder, monkeypatch, measured("training", met=False))
    assert record_path(folder, HARDWARE).exists()


def test_figures_of_tiny_workloads_do_not_replace_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["vs_trl", "--tiny"])
    with pytest.raises(SystemExit) as refused:
        vs_trl.main()
    assert refused.value.code == 2


def test_what_comes_by_pythonpath_reaches_each_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"/wheels{os.pathsep}/more")
    assert vs_trl.environment()["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "/wheels", "/more"]
    monkeypatch.delenv("PYTHONPATH")
    assert vs_trl.environment()["PYTHONPATH"] == str(ROOT), "an empty part would be the working folder"


def test_the_quickstarts_sums_are_made_for_a_benchmark_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    sums = next(case.workload for case in GATED if case.name == "tiny")
    write(sums, tmp_path / "measured")
    assert (tmp_path / "measured" / "model" / "config.json").exists()
    assert (tmp_path / "measured" / "prompts.parquet").exists()


NEEDED = {"datasets", "numpy", "pyarrow", "torch", "transformers", "trl"}
DRAWS = {"matplotlib"}  # after a case is measured, where results are written


def imported(module: str) -> Iterator[str]:
    """Modules that a module of benchmarks imports, at its top or within functions."""
    for node in ast.walk(ast.parse((ROOT / "benchmarks" / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_the_comparison_needs_no_package_that_comes_without_pytorch_and_trl() -> None:
    found, left = set[str](), ["vs_trl", "side_ours", "side_trl"]
    seen = set(left)
    while left:
        names = {*imported(left.pop())}
        found |= names
        more = {name.partition(".")[2] for name in names if name.startswith("benchmarks.")} - seen
        seen |= more
        left += more
    assert "workload" in seen
    outside = {name.partition(".")[0] for name in found} - {"benchmarks", "grpo_core", "tasks"}
    assert outside - sys.stdlib_module_names == NEEDED | DRAWS
