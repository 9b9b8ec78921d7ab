"""Tokens per pass that a start of a training begins with: the plan's, if they fit this machine's GPU, and no more than
an earlier start found when memory ran out with a sharded model."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from grpo_core.config.run import RunConfig
from grpo_core.distributed import max_over_processes
from grpo_core.planning.hardware import Gpu
from grpo_core.planning.memory import PlannedRun, peak_memory
from grpo_core.planning.plan import Plan
from grpo_core.planning.shapes import ForecastError, PromptLengths, load_shape
from grpo_core.planning.tokens_per_pass import choose_tokens
from grpo_core.system.memory import GIB, gib_text


def first_limit(config: RunConfig, plan: Plan, longest_prompt: int, accelerator: Accelerator) -> int:
    """Return the plan's tokens per pass, or those of b sequences of the greatest length if it has chosen none; fewer,
    and say so, if they cannot fit a GPU of this training, which may not be one that the plan was made for. Called by
    every process, and the same on each.

    What the plan only left no margin for is kept: results follow from the number by rounding.
    """
    planned = plan.max_tokens_per_pass
    most = planned or plan.per_device_train_batch_size * (longest_prompt + config.rollout.max_completion_length)
    tokens = most
    if accelerator.device.type == "cuda":
        properties = torch.cuda.get_device_properties(accelerator.device)
        gpu = Gpu(properties.name, properties.total_memory / GIB)
        tokens = -max_over_processes(-_fitting(config, plan, most, longest_prompt, gpu))
        if tokens < most and accelerator.is_main_process:
            print(
                f"training: {most} tokens per pass, {'of the plan' if planned else 'which the plan did not limit'}, do "
                f"not fit a {gpu.name} of {gib_text(properties.total_memory / GIB)}: going on with {tokens}, with the "
                "same results up to rounding",
                flush=True,
            )
    return tokens


def _fitting(config: RunConfig, plan: Plan, most: int, longest_prompt: int, gpu: Gpu) -> int:
    """Return these tokens per pass, or the number that is chosen for this GPU if they are more than it holds; with its
    margin, if the plan has chosen none."""
    lengths = PromptLengths(longest_prompt, longest_prompt, "")
    try:
        shape = load_shape(config.model.name_or_path, config.model.revision)
    except ForecastError:  # nothing is known of its memory
        return most
    run = PlannedRun(config, plan, shape, lengths, gpu)
    if plan.max_tokens_per_pass and "warning" not in peak_memory(run):
        return most
    chosen = choose_tokens(run)
    assert chosen is not None
    return min(chosen, most)
