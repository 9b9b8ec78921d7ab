"""The five stages, each by the smallest work there is."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_core.config.files import dump_config, parse_config
from tasks.stages.condition import conditions
from tasks.stages.run import Context, run_stage
from tasks.stages.run_directory import read_config
from tasks.stages.table import STAGES, Stage

Values = dict[str, Any]


def configure(run: Path, values: Values) -> None:
    (run / "config.toml").write_text(dump_config(parse_config(values)))


def validate(context: Context) -> Values:
    config = context.config
    sources = {"train": config.data.train, "eval": config.data.eval}
    sources |= {config.evaluation_files[each.name]: each.data for each in config.evaluation.sets}
    for name, source in sources.items():
        (context.partial / f"{name}.parquet").write_bytes(Path(source).read_bytes())
    return {"num_prompts": dict(zip(sources, (24, 16, 10), strict=False))}


def _plan(context: Context) -> Values:
    return {"plan": {"max_steps": context.config.train.max_steps}, "forecasts": {"pace": uuid.uuid4().hex}}


def _train(context: Context) -> Values:
    return {"counted": {"updates": 4}}


def _evaluate(context: Context) -> Values:
    difference = {"mean": 0.25, "low": 0.125, "high": 0.375}
    differences = {"base": dict.fromkeys(("accuracy", "reward"), difference)}
    return {"sets": {"held-out": {"differences": differences}}, "deciding_metric": "accuracy"}


def _register(context: Context) -> Values:
    return {"model_name": "sums", "version": "7", "alias": "candidate"}


WORK: dict[str, Callable[[Context], Values]] = {
    "validate": validate,
    "plan": _plan,
    "train": _train,
    "evaluate": _evaluate,
    "register": _register,
}


def do(stage: Stage, run: Path, force: bool = False, work: Callable[[Context], Values] | None = None) -> bool:
    """Run the stage; True if it was executed, False if it was skipped."""
    state = run_stage(stage, run, read_config(run), work or WORK[stage.name], force)
    if state.is_cancelled():
        raise state.data
    return state.name != "Skipped"


def pipeline(run: Path) -> list[str]:
    """The stages that are executed when all are asked for in order."""
    return [stage.name for stage in STAGES if do(stage, run)]


def outdated(run: Path) -> dict[str, str]:
    return {name: found.reason for name, found in conditions(run, read_config(run)).items() if not found.is_up_to_date}
