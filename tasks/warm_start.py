"""The stage warm-start: runs `grpo_core.train --warm-start` in supervised processes, and checks its result."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.client.schemas.objects import State

from grpo_core import run_files
from grpo_core.config.run import RunConfig
from grpo_core.config.warm_start import supervised
from grpo_core.data.demonstrations import demonstrations_file, read_demonstrations
from grpo_core.planning.hardware import capability, find_gpu
from grpo_core.planning.shapes import PromptLengths
from grpo_core.planning.tokens_per_pass import with_tokens_per_pass
from grpo_core.planning.warm_start import plan_warm_start
from tasks.processes.training import check_result, run_training
from tasks.processes.training_machine import check_training_machine
from tasks.processes.vllm_servers import gpus_and_servers
from tasks.stages.files import read_json, write_text
from tasks.stages.run import Context, run_stage
from tasks.stages.table import WARM_START
from tasks.tracking.artifacts import show_markdown
from tasks.tracking.live import OUTPUT, Output


@task(name="warm-start")
def warm_start(run: Path, config: RunConfig, force: bool = False) -> State[None]:
    return run_stage(WARM_START, run, config, _work, force)


def _work(context: Context) -> dict[str, Any]:
    check_training_machine(context.config)
    log, gpu = get_run_logger(), find_gpu()
    found = read_demonstrations(demonstrations_file(context.config, context.run))
    config = supervised(context.config, found.longest_completion)
    longest_prompt = found.longest - found.longest_completion
    lengths = PromptLengths(longest_prompt, longest_prompt, "of the demonstrations")
    plan = plan_warm_start(context.config, len(found.rows), found.longest_completion)
    plan = with_tokens_per_pass(config.with_precision(capability(gpu)), plan, lengths, gpu)
    folder = context.partial
    write_text(folder / run_files.PLAN, json.dumps({"plan": asdict(plan)}, indent=2) + "\n")
    log.info("%d updates of %d demonstrations, of %d", plan.max_steps, plan.effective_batch_size, plan.num_prompts)
    # Otherwise the training had finished, and the stage was killed before publishing it.
    if not read_json(folder / WARM_START.receipt):
        place, output = replace(context, config=config), Output(folder / OUTPUT, log)
        try:
            with gpus_and_servers(place, log, is_training=True) as environment:
                run_training(place, output.line, environment, log, ["--warm-start"])
        finally:
            output.close()
    result = read_json(folder / WARM_START.receipt)
    check_result(result, folder / run_files.METRICS, plan)
    rows = [json.loads(line) for line in (folder / run_files.METRICS).read_text().splitlines()]
    said = f"From a loss of {rows[0]['loss']:.3f} per token in the first update to {rows[-1]['loss']:.3f} in the last"
    show_markdown("warm-start", f"# Warm start\n\n{said}. All updates: `{WARM_START.path(context.run)}`.\n", said)
    return result
