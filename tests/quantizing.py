"""`python -m tests.quantizing CONFIG`: what becomes of a table of stages with one stage more, in a process of its own.

The stage `quantize` is added to the table before anything else reads it. All stages do work that takes no time; the
pipeline, the command line, the deployments and the Prefect server are the real ones. Prints JSON.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from prefect import task
from prefect.client.schemas.objects import State

from grpo_core.config.run import RunConfig
from grpo_core.evaluation.comparison import compare_policies
from grpo_core.planning.plan import make_plan, plan_inputs
from grpo_core.run_files import SAMPLES
from tasks.stages import table
from tasks.stages.table import ALL_STAGES, PUBLISH, REGISTER, STAGES, TRAIN, Stage
from tests.made_up import outcomes_of, samples_of

QUANTIZE = Stage(
    name="quantize",
    task="tests.quantizing:quantize",
    meaning="Quantize the run's policy.",
    output="quantized",
    receipt="result.json",
    depends_on=lambda parts: parts.policy | {"bits": 8},
    key_figure=lambda config, receipt: f"{receipt['bits']} bits",
    gpu=True,
    reads=(TRAIN,),
)
table.STAGES = (*STAGES[:-1], QUANTIZE, REGISTER)
table.ALL_STAGES = (*ALL_STAGES[:-2], QUANTIZE, REGISTER, PUBLISH)

from tasks.stages.run import Context, run_stage  # noqa: E402 (reads the table)

done: list[str] = []
parsed: list[RunConfig] = []


@task(name="quantize")
def quantize(run: Path, config: RunConfig, force: bool = False) -> State[None]:
    return run_stage(QUANTIZE, run, config, _quantize, force)


def _quantize(context: Context) -> dict[str, Any]:
    done.append("quantize")
    return {"bits": 8}


def _validate(context: Context) -> dict[str, Any]:
    for name in ("train", "eval"):
        (context.partial / f"{name}.parquet").write_text(name)
    return {"num_prompts": {"train": 24, "eval": 60}}


def _plan(context: Context) -> dict[str, Any]:
    return {"plan": asdict(make_plan(plan_inputs(context.config, 24)))}


def _train(context: Context) -> dict[str, Any]:
    counts = make_plan(plan_inputs(context.config, 24)).counts(context.config.train.max_steps)
    ended = {"stopped_early_at_step": None, "best_step": None, "train_seconds": 1.0}
    ended |= {"sampled_tokens": 1, "resumed_at_step": 0}
    return {"counted": counts, "planned": counts, **ended}


def _evaluate(context: Context) -> dict[str, Any]:
    policies = ["base", "trained"]
    right = {"base": np.zeros(60), "trained": outcomes_of(1, 0.5)}
    samples = samples_of(right)
    samples.write_parquet(context.partial / SAMPLES)
    sets = compare_policies(samples, context.config, policies)
    return {"policies": policies, "champion": None, "deciding_metric": "accuracy", "temperature": 0.0, "sets": sets}


def _register(context: Context) -> dict[str, Any]:
    return {"model_name": "sums", "version": "1", "alias": "candidate"}


def _quick(name: str) -> Any:
    def work(context: Context) -> dict[str, Any]:
        done.append(name)
        return globals()[f"_{name}"](context)

    return work


def _printed(*arguments: str) -> str:
    """What `grpo ARGUMENTS` prints."""
    from flows.cli.main import app

    with redirect_stdout(io.StringIO()) as text:
        app(arguments, standalone_mode=False)
    return text.getvalue()


def main(file: str) -> None:
    for stage in STAGES:
        sys.modules[stage.load_task().fn.__module__]._work = _quick(stage.name)  # type: ignore[attr-defined]
    validate = RunConfig.model_validate

    def counted(*args: Any, **kwargs: Any) -> RunConfig:
        parsed.append(validate(*args, **kwargs))
        return parsed[-1]

    RunConfig.model_validate = counted  # type: ignore[method-assign]
    _printed("run", file)
    answer: dict[str, Any] = {"ran": [*done], "parsed": len(parsed)}
    _printed("stage", "quantize", "--run", "test", "--force")
    answer["ran by itself"] = done[len(answer["ran"]) :]
    answer["status"] = _printed("status", "test")

    from flows import pipeline
    from flows.serving.deployments import deployments
    from tasks.stages.lineage import lineage_keys

    answer["deployments"] = [it.full_name for it in deployments()]
    answer["lineage"] = [*lineage_keys(parsed[0])]
    handed_over: list[str] = []

    def hand_over(stage: Stage, *_: Any) -> bool:
        handed_over.append(stage.name)
        return True

    pipeline._hand_over = hand_over
    os.environ[table.GPU_DEPLOYMENT] = "gpu"
    pipeline.make_pipeline(parsed[0])("test", {})
    answer["handed over"] = handed_over
    print(json.dumps(answer))


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    sys.modules["tests.quantizing"] = sys.modules["__main__"]  # the table names it
    main(sys.argv[1])
