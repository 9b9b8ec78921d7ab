"""One flow per stage: `NAME_run` runs that stage of an earlier run, which must have the input that the stage reads."""

from __future__ import annotations

from typing import Any

from prefect import Flow, flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.runtime import deployment
from prefect.states import Completed

from tasks.stages.attempts import restore_lost_retry
from tasks.stages.endings import end_in_plain_words
from tasks.stages.locks import locked
from tasks.stages.run_directory import find_run, read_config
from tasks.stages.table import ALL_STAGES, Stage

# Prefect shows this on the deployment's page after the stage's meaning, as Markdown with every line a paragraph.
HOW = """

Run → Custom run, `run`: the name of an earlier run. A stage that is up to date is skipped unless `force` is on. A \
stage whose input is missing or outdated says what to run first. Afterwards, start the pipeline with that run's \
configuration: it runs the stages that depend on this one, and nothing else.
"""
# Prefect's form shows this beside the fields.
ARGUMENTS = """
Args:
    run: Name of an earlier run, as under runs/ in the storage root. Its own configuration is used.
    force: Run the stage even if it is up to date. The stages that depend on it become stale; its old output is kept.
"""


def _stage_flow(stage: Stage) -> Flow[..., State[None]]:
    task = stage.load_task()

    @end_in_plain_words
    def run_stage(run: str, force: bool = False) -> State[None]:
        with locked(find_run(run), get_run_logger().warning, wait=bool(deployment.id)) as folder:
            state = task(folder, read_config(folder), force)
            state.result()  # raises the error by which the task has failed
            return Completed(message=state.message)

    run_stage.__name__ = run_stage.__qualname__ = f"{stage.name}_run"  # the name that a deployment's entrypoint gives
    run_stage.__doc__ = f"{stage.meaning}\n{ARGUMENTS}"
    options: dict[str, Any] = {"description": stage.meaning + HOW, "flow_run_name": f"{{run}}-{stage.name}"}
    return flow(name=stage.name, on_crashed=[restore_lost_retry], **options)(run_stage)


FLOWS = {stage.name: _stage_flow(stage) for stage in ALL_STAGES}
globals().update({f"{name}_run": its_flow for name, its_flow in FLOWS.items()})  # where Prefect looks for them
