"""The stage plan: what the run will do and need, or why it is refused and what would work. Seconds, no GPU."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.objects import State

from grpo_core.config.run import RunConfig
from grpo_core.config.training import BF16_CAPABILITY
from grpo_core.planning.forecast import PromptLengths, find_gpu, forecast, forecast_rows, name_hardware
from grpo_core.planning.plan import make_plan, plan_inputs
from tasks.data.sources import list_pass_rates
from tasks.stages.run import Context, run_stage
from tasks.stages.table import GPU_DEPLOYMENT, PLAN, VALIDATE
from tasks.tracking.runs import earlier_throughput


@task(name="plan")
def plan(run: Path, config: RunConfig, force: bool = False) -> State[None]:
    return run_stage(PLAN, run, config, _work, force)


def _work(context: Context) -> dict[str, Any]:
    config, data = context.config, VALIDATE.read_receipt(context.run)
    num_prompts, lengths = data["num_prompts"]["train"], data["lengths"]["train"]
    plan = make_plan(plan_inputs(config, num_prompts))
    figures = asdict(plan)
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
    if handed_to := os.environ.get(GPU_DEPLOYMENT):
        gpu, hardware = f"GPU of train/{handed_to}", ""
    else:
        hardware = name_hardware(gpu := find_gpu())
    for note in config.gpu_notes if gpu else []:
        get_run_logger().warning(note)
    forecasts = forecast(
        config.with_precision(BF16_CAPABILITY if gpu else None),
        plan,
        PromptLengths(lengths["mean"], lengths["max"], "from the validated data"),
        earlier_throughput(config, hardware),
        list_pass_rates("data.train", config.data.train, config.data.train_split),
        gpu,
    )
    table = [{"quantity": name, "value": f"{value:,}", "how": ""} for name, value in figures.items()]
    table += [{"quantity": name, "value": value, "how": how} for name, value, how in forecast_rows(forecasts)]
    create_table_artifact(key="plan", table=table, description="What the training will do, take and need")
    return {"plan": figures, "forecasts": forecasts}
