"""One flow per stage: `NAME_run` runs that stage of an earlier run, which must have what the stage reads."""

from __future__ import annotations

from typing import Any

from prefect import Flow, Task, flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import deployment

from tasks.evaluate import evaluate
from tasks.plan import plan
from tasks.register import register
from tasks.stages.attempts import keep_retry
from tasks.stages.refusals import plain
from tasks.stages.run_directory import find_run, locked
from tasks.train import train
from tasks.validate import validate

# Prefect shows it on the page of the deployment, as Markdown with every line a paragraph, after what the stage does.
HOW = """

Run → Custom run, `run`: the name of an earlier run. A stage that is up to date is skipped unless `force` is on; one \
that lacks what it reads says what to run first. The pipeline, started again with that run's configuration, then does \
again what depends on this stage, nothing else.
"""
# Prefect's form shows this beside the fields.
ARGUMENTS = """
Args:
    run: Name of an earlier run, as under runs/ in the storage root. Its own configuration is used.
    force: Run the stage though it is up to date. What depends on it is stale then, and what it replaces is kept.
"""


def _stage_flow(task: Task[..., State[None]], meaning: str) -> Flow[..., None]:
    @plain
    def run_stage(run: str, force: bool = False) -> None:
        with locked(find_run(run), get_run_logger().warning, wait=bool(deployment.id)) as folder:
            task(folder, force).result()

    run_stage.__name__ = run_stage.__qualname__ = f"{task.name}_run"  # where a deployment looks for it in this module
    run_stage.__doc__ = f"{meaning}\n{ARGUMENTS}"
    options: dict[str, Any] = {"description": meaning + HOW, "flow_run_name": f"{{run}}-{task.name}"}
    return flow(name=task.name, on_crashed=[keep_retry], **options)(run_stage)


validate_run = _stage_flow(validate, "Hold the run's prompts and rewards against the data contract again.")
plan_run = _stage_flow(plan, "Plan the run again: steps, memory, time.")
train_run = _stage_flow(train, "Train the run's policy, on from the last checkpoint of an unfinished training.")
evaluate_run = _stage_flow(evaluate, "Evaluate base and trained policy of the run side by side.")
register_run = _stage_flow(register, "Register the run's policy as a model version.")
