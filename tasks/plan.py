"""The stage plan: what the run will do and need, or why it is refused and what would work.

Takes seconds; up to two minutes if no earlier run tells the pace, which is then measured, on a GPU if one is free."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.client.schemas.objects import State

from grpo_core import run_files
from grpo_core.config.run import RunConfig
from grpo_core.data.curriculum import arrange, curriculum_notes, describe, read_rates
from grpo_core.data.order import epoch_rows, source_counts
from grpo_core.data.prompts import FileRows, check_teacher_tokenizer, load_tokenizer
from grpo_core.data.recording import check_recording, check_tokens
from grpo_core.data.teacher import check_teacher, silent_notes, teacher_notes
from grpo_core.planning.adapter import base_notes, check_adapter
from grpo_core.planning.forecast import forecast, forecast_rows
from grpo_core.planning.hardware import Gpu, capability, find_gpu, hardware_notes, name_hardware
from grpo_core.planning.nvidia import problem_of_driver
from grpo_core.planning.pace import Pace, Throughput
from grpo_core.planning.plan import Plan, make_plan, plan_inputs, plan_rows
from grpo_core.planning.sampling_notes import sampling_notes
from grpo_core.planning.shapes import PromptLengths
from grpo_core.planning.tokens_per_pass import with_tokens_per_pass
from grpo_core.planning.warm_start import describe_warm_start
from tasks.data.forecast_inputs import demonstrated_sizes, validated
from tasks.data.sources import validated_pass_rates
from tasks.processes.measure import check_model, measured_pace
from tasks.rendering.markdown import escape
from tasks.stages.errors import StageError
from tasks.stages.run import Context, run_stage
from tasks.stages.table import GPU_DEPLOYMENT, PLAN, PROBE, VALIDATE, WARM_START
from tasks.tracking.artifacts import show_table
from tasks.tracking.earlier_runs import earlier_throughput


@task(name="plan")
def plan(run: Path, config: RunConfig, force: bool = False) -> State[None]:
    return run_stage(PLAN, run, config, _work, force)


def _work(context: Context) -> dict[str, Any]:
    config, data = context.config, validated(VALIDATE.path(context.run), VALIDATE.read_receipt(context.run))
    check_adapter(config.model)
    check_teacher(config, max(data.longest, data.longest_shown) + config.rollout.max_completion_length)
    check_teacher_tokenizer(config)
    plan = make_plan(plan_inputs(config, *data.num_prompts))
    if config.rollout.engine == "recorded":
        check_recording(config, plan, context.run)
        check_tokens(config, plan, load_tokenizer(config.model), FileRows(data.prompts))
    get_run_logger().info(
        "%d updates of %d completions, %d per prompt; prompts dropped per epoch: %d",
        plan.max_steps,
        plan.effective_batch_size,
        plan.num_generations,
        plan.dropped_prompts_per_epoch,
    )
    if plan.max_completions > plan.completions:
        get_run_logger().info(
            "dynamic sampling: %d completions are trained on, at most %d are sampled",
            plan.completions,
            plan.max_completions,
        )
    lengths = PromptLengths(data.mean_tokens, data.longest, "from the validated data", data.longest_shown)
    handed_to = os.environ.get(GPU_DEPLOYMENT)
    gpu = Gpu(f"GPU of train/{handed_to}") if handed_to else find_gpu()
    config = config.with_precision(capability(gpu))
    problem = "" if handed_to else problem_of_driver()
    check_model(config, lengths.longest, gpu, get_run_logger().info)
    plan = with_tokens_per_pass(config, plan, lengths, gpu)
    notes = [*curriculum_notes(config, plan), *sampling_notes(config), *hardware_notes(config, gpu)]
    notes += base_notes(config.model)
    for note in [*notes, *([problem] if problem else [])]:
        get_run_logger().warning(note)
    source: Throughput | Pace | str | None = earlier_throughput(config, "" if handed_to else name_hardware(gpu))
    if source is None and not handed_to:
        prompts = None if data.has_images else data.prompts  # random tokens stand for those with images
        source = measured_pace(config, plan, lengths, gpu, prompts, get_run_logger().info)
    warm = None
    if config.warm_start.is_used:
        (shown,) = WARM_START.inputs(config)
        sizes = demonstrated_sizes(shown.read_receipt(context.run))
        if sizes is None:
            raise StageError(
                f"run {context.run.name!r} has a probe of an earlier version, which kept no completions to train on; "
                f"first run: grpo stage probe --run {context.run.name} --force"
            )
        text, warm = describe_warm_start(config, sizes.rows, sizes, gpu)
        get_run_logger().info(text)
    rates, taken = _first_epoch(config, plan, context.run)
    pass_rates = rates or validated_pass_rates(data.prompts)
    for note in teacher_notes(config):
        get_run_logger().info(note)
    for note in silent_notes(config, pass_rates):
        get_run_logger().warning(note)
    # Without `sampling`: this run's configuration has already taken the place of its last training's.
    forecasts = forecast(config, plan, lengths, source, pass_rates, gpu, costs=data.costs, warm=warm)
    figures, sources = asdict(plan), source_counts(plan, config.seed)
    table = [{"quantity": name, "value": value, "how": ""} for name, value in plan_rows(figures)]
    for source, counts in sources.items():
        how = ", ".join(f"{name} {value:,}" for name, value in counts.items() if name != "prompts_seen")
        table.append({"quantity": f"prompts of {source}", "value": f"{counts['prompts_seen']:,}", "how": how})
    table += [{"quantity": name, "value": value, "how": escape(how)} for name, value, how in forecast_rows(forecasts)]
    if taken:
        get_run_logger().info("epoch 1 takes %s", taken)
        table.append({"quantity": "epoch 1 takes", "value": taken, "how": "pass rates of the base model"})
    show_table("plan", table, "What the training will do, take and need")
    return {"plan": figures, "sources": sources, "forecasts": forecasts}


def _first_epoch(config: RunConfig, plan: Plan, run: Path) -> tuple[list[float], str]:
    """Return the base model's pass rates on the prompts of the first epoch, and a description of these prompts; both
    empty if the run has no probe."""
    if not PROBE.is_asked(config):
        return [], ""
    keys, seed = config.data.curriculum, config.seed
    rates = read_rates(PROBE.path(run) / run_files.PASS_RATES, plan.num_prompts)
    rows = arrange(epoch_rows(plan, seed, 0), rates, keys, plan, seed, 0)
    return rates.rate[rows[rates.known[rows]]].tolist(), describe(rates, rows, keys, plan)
