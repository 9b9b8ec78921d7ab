"""Skip a test that needs a package that is not there: one line per package. What trains needs none of these: there it
fails. Loaded where vLLM is not installed (tests/conftest.py), as on the machine of requirements/gpu-machine.txt."""

from __future__ import annotations

import traceback
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LACKING = ("bitsandbytes", "fastapi", "httpx2", "mlflow", "polars", "prefect", "starlette", "vllm")
MAY_NEED = (
    *("tests", "tasks", "grpo_core/evaluation", "grpo_core/model/four_bit.py", "grpo_core/rollout/vllm"),
    *("grpo_core/data/served_teacher.py", "grpo_core/rollout/served_teacher.py"),
)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    call = getattr(report, "call", None)
    return _skipped(report, call.excinfo.value.__cause__) if report.failed and call else report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    report = yield
    return _skipped(report, call.excinfo.value) if report.failed and call.excinfo else report


def _skipped(report: Any, error: BaseException | None) -> Any:
    package = str(getattr(error, "name", "")).partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and package in LACKING:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [Path(it.filename) for it in frames if Path(it.filename).is_relative_to(ROOT)]
        importer = ours[-1].relative_to(ROOT)
        if any(importer.is_relative_to(room) for room in MAY_NEED):
            report.outcome, report.longrepr = "skipped", ("tests", None, f"needs {package}, which is not installed")
    return report
