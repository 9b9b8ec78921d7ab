"""Stage 2, plan: the run in figures, or the refusal with its fixes. Seconds, no GPU."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.objects import State

from grpo_core.plan import make_plan, plan_inputs
from tasks.stage import PLAN, VALIDATE, Context, run_stage


@task(name="plan")
def plan(run: Path) -> State[None]:
    return run_stage(PLAN, run, _work)


def _work(context: Context) -> dict[str, Any]:
    num_prompts = VALIDATE.read_receipt(context.run)["num_prompts"]["train"]
    figures = asdict(make_plan(plan_inputs(context.config, num_prompts)))
    get_run_logger().info(
        "%d updates of %d completions (%d prompts × %d); %d prompts dropped an epoch",
        figures["max_steps"],
        figures["effective_batch_size"],
        figures["effective_batch_size"] // figures["num_generations"],
        figures["num_generations"],
        figures["dropped_prompts_per_epoch"],
    )
    if figures["max_completions"] > figures["completions"]:
        get_run_logger().info(
            "dynamic sampling: %d completions are trained on, at most %d are sampled",
            figures["completions"],
            figures["max_completions"],
        )
    create_table_artifact(key="plan", table=[{"quantity": k, "value": v} for k, v in figures.items()])
    return {"plan": figures}
