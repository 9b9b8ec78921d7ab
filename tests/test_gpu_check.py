"""`make gpu-check` on this machine, without a GPU: what it prints, writes and says of what it cannot ask."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_check


def _checked(monkeypatch: pytest.MonkeyPatch, output: Path, *checks: str) -> dict[str, dict[str, object]]:
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--output", str(output), "--only", *checks])
    gpu_check.main()
    return {result["check"]: result for result in json.loads(output.read_text())["checks"]}


def test_a_check_that_hangs_is_ended_and_said_to_have_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(gpu_check.CHECKS, "hardware", 0.05)
    output = tmp_path / "found.json"
    with pytest.raises(SystemExit, match=f"failed: hardware. Please send {output} back"):
        _checked(monkeypatch, output, "hardware")
    [result] = json.loads(output.read_text())["checks"]
    assert not result["passed"]
    assert "stopped after 0.05 s" in result["output"]
    assert "stopped after 0.05 s" in capsys.readouterr().out


def test_a_row_says_what_was_found_what_was_demanded_and_whether_it_passed() -> None:
    rows = [{"what": "drift", "found": "0.2", "demanded": "at most 0.1", "passed": False}]
    text = gpu_check.table({"rows": rows, "output": "Traceback\nValueError: wrong"})
    assert [word for word in ("drift", "0.2", "at most 0.1", "FAILED", "ValueError: wrong") if word not in text] == []


@pytest.mark.e2e
def test_without_a_gpu_the_checks_run_cut_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = _checked(
        monkeypatch, tmp_path / "found.json", "hardware", "attention", "head", "waits", "memory", "resume", "processes"
    )
    assert all(result["passed"] for result in found.values())
    assert len(found["attention"]["rows"]) >= 16  # type: ignore[arg-type]
    assert capsys.readouterr().out.count("needs a GPU") == 3
