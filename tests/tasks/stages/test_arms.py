"""What one arm of a sweep has made, the others take over; what would come out differently is made."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tasks.stages.arms import sweep_folder
from tasks.stages.condition import conditions
from tasks.stages.run_directory import read_config
from tasks.stages.table import PLAN, STAGES, VALIDATE
from tests.conftest import write_sums
from tests.tasks.stages.small_stages import WORK, Values, configure, do


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the work of each stage was done."""
    counts: Counter[str] = Counter()

    def counted(name: str, work: Any) -> Any:
        def do_work(context: Any) -> Values:
            counts[name] += 1
            return work(context)

        return do_work

    for name, work in list(WORK.items()):
        monkeypatch.setitem(WORK, name, counted(name, work))
    return counts


def arm(run: Path, values: Values, name: str, sweep: str | None = "sums.sweep", **sections: Any) -> Path:
    folder = run.parent / name
    folder.mkdir()
    registry = {"sweep": sweep} if sweep else {}
    configure(folder, {**values, "name": name, "registry": registry, **sections})
    for stage in STAGES:
        do(stage, folder)
    return folder


@pytest.mark.slow
def test_data_is_validated_once_in_a_sweep_and_planned_once_per_plan(
    run: Path, values: Values, made: Counter[str]
) -> None:
    first = arm(run, values, "sums.sweep.a")
    assert made == dict.fromkeys(WORK, 1), "runs outside the sweep give nothing to it"
    seeded = arm(run, values, "sums.sweep.b", seed=1)
    arm(run, values, "sums.sweep.c", train={**values["train"], "learning_rate": 0.5})
    assert made == {"validate": 1, "plan": 2, "train": 3, "evaluate": 3, "register": 3}
    receipt = VALIDATE.read_receipt(seeded)
    assert (receipt["taken_from"], receipt["num_prompts"]) == ("sums.sweep.a", {"train": 24, "eval": 16})
    assert (VALIDATE.path(seeded) / "train.parquet").read_bytes() == (
        VALIDATE.path(first) / "train.parquet"
    ).read_bytes()
    assert PLAN.read_receipt(seeded)["forecasts"] == PLAN.read_receipt(first)["forecasts"]
    assert all(found.is_up_to_date for found in conditions(seeded, read_config(seeded)).values())


def test_what_would_come_out_differently_is_made(run: Path, values: Values, made: Counter[str], tmp_path: Path) -> None:
    first = arm(run, values, "sums.sweep.a")
    arm(
        run,
        values,
        "sums.sweep.b",
        data={**values["data"], "train": str(write_sums(tmp_path / "more.parquet", 10, 36))},
    )
    arm(run, values, "other.a", sweep="other")
    arm(run, values, "sums.sweep-2.a", sweep="sums.sweep-2")
    arm(run, values, "sums.sweep.none", sweep=None)
    assert made["validate"] == made["plan"] == 5
    (VALIDATE.path(first) / "train.parquet").unlink()
    (run.parent / "sums.sweep.b").rename(run.parent / "elsewhere")
    (run.parent / "sums.sweep.none").rename(run.parent / "elsewhere-too")
    damaged = arm(run, values, "sums.sweep.d")
    assert made["validate"] == 6, "an output without its files is no output"
    assert do(VALIDATE, damaged, force=True), "made again, as asked"
    assert made["validate"] == 7


def test_a_sweep_has_a_folder_beside_the_runs(run: Path) -> None:
    assert sweep_folder("sums.sweep") == run.parents[1] / "sweeps" / "sums.sweep"
