"""How every stage runs: skipped when its output already carries its lineage key, else done, checked and published."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed

from grpo_core.config import RunConfig, load_config
from tasks.lineage import lineage_keys
from tasks.storage import remove, set_aside, write_text


class StageError(RuntimeError):
    """A stage that failed for a reason a person can act on; the message says which."""


@dataclass(frozen=True)
class Context:
    """What a stage works with. `partial`: where it writes; renamed to its final name when the stage succeeds."""

    config: RunConfig
    run: Path
    partial: Path


@dataclass(frozen=True)
class Stage:
    """`output`: under the run directory; `receipt`: the JSON in it that carries the lineage key, or "" for itself."""

    name: str
    output: str
    receipt: str = ""
    resumable: bool = False

    def path(self, run: Path) -> Path:
        return run / self.output

    def read_receipt(self, run: Path) -> dict[str, Any]:
        """The stage's figures; empty when it has not been done."""
        path = self.path(run) / self.receipt
        return json.loads(path.read_text()) if path.is_file() else {}


VALIDATE = Stage("validate", "dataset", "report.json")
PLAN = Stage("plan", "plan.json")
TRAIN = Stage("train", "training", "result.json", resumable=True)
EVALUATE = Stage("evaluate", "evaluation", "report.json")
REGISTER = Stage("register", "registration.json")


def run_stage(stage: Stage, run: Path, work: Callable[[Context], dict[str, Any]]) -> State[None]:
    """Do `work` unless the output is already the one that this configuration and its inputs give.

    `work` fills `Context.partial` and returns the receipt's content. A stage that is `resumable` finds what an
    interrupted attempt of the same lineage left there; any other starts empty.
    """
    config = load_config(run / "config.toml")
    key = lineage_keys(config)[stage.name]
    final = stage.path(run)
    done = stage.read_receipt(run)
    if done.get("lineage_key") == key:
        get_run_logger().info("%s: up to date (lineage %s), skipped", stage.name, key[:12])
        return Completed(name="Skipped", message=f"{final.name} already has lineage key {key}")
    partial = final.with_name(final.name + ".partial")
    _prepare(stage, partial, key)
    receipt = work(Context(config, run, partial))
    text = json.dumps({"lineage_key": key, **receipt}, indent=2) + "\n"
    write_text(partial / stage.receipt if stage.receipt else partial, text)
    set_aside(final, done.get("lineage_key", "unknown"))
    partial.rename(final)
    return Completed(message=f"wrote {final.name} (lineage {key[:12]})")


def _prepare(stage: Stage, partial: Path, key: str) -> None:
    marker = partial / "lineage_key"
    if stage.resumable and marker.is_file():
        left_by = marker.read_text()
        if left_by == key:
            return
        set_aside(partial, left_by)
    remove(partial)
    if stage.receipt:
        partial.mkdir()
    if stage.resumable:
        write_text(marker, key)
