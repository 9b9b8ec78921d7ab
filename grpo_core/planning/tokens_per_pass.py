"""How many tokens a forward pass may have on a GPU: chosen from its memory, or as configured; and in a file of a
training's output, how many it may have after memory ran out. Imports no torch."""

from __future__ import annotations

import os
import socket
from bisect import bisect_right
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from grpo_core.planning.hardware import Gpu
from grpo_core.planning.memory import PlannedRun, beside_training, training_parts, usable_gib
from grpo_core.planning.passes import longest_sequence, most_tokens, planned_pass
from grpo_core.planning.plan import Plan
from grpo_core.planning.shapes import ForecastError, PromptLengths, load_shape, load_teachers
from grpo_core.system.files import publish
from grpo_core.system.memory import GIB

FILE = "tokens_per_pass"  # of a training's output
STEP = 256  # tokens, of which the number chosen is a multiple where memory sets it


def with_tokens_per_pass(config: RunConfig, plan: Plan, lengths: PromptLengths, gpu: Gpu | None) -> Plan:
    """Return the plan with `max_tokens_per_pass` chosen from the GPU's memory, unless it is configured. None stays, as
    on a CPU, if the memory or the model's sizes are not known.

    Raises ConfigError if the configured number is below the longest sequence.
    """
    tokens, longest = plan.max_tokens_per_pass, longest_sequence(config, lengths)
    if tokens is not None and tokens < longest:
        raise ConfigError(
            f"train.max_tokens_per_pass = {tokens}: a sequence may have {longest} tokens, {lengths.longest} of its "
            f"prompt ({lengths.how}) and {config.rollout.max_completion_length} of its completion, and a pass holds at "
            f"least one; set it to {longest} or more, or lower rollout.max_completion_length"
        )
    if tokens is None and gpu is not None:
        with suppress(ForecastError):  # which the forecast of memory names
            shape = load_shape(config.model.name_or_path, config.model.revision)
            tokens = choose_tokens(PlannedRun(config, plan, shape, lengths, gpu, load_teachers(config)))
    return replace(plan, max_tokens_per_pass=tokens)


def choose_tokens(run: PlannedRun) -> int | None:
    """Return the most tokens of a pass that the GPU's memory holds by the forecast; at least those of the longest
    sequence, and no more than `most_tokens`. None if the GPU's memory is not known."""
    config, plan, lengths, usable = run.config, run.plan, run.lengths, usable_gib(run.gpu)
    if usable is None:
        return None
    held, _, _ = beside_training(run)
    room = usable * GIB - sum(held.values())

    def needed(tokens: int) -> float:
        size = planned_pass(config, replace(plan, max_tokens_per_pass=tokens), lengths, run.shape)
        return sum(training_parts(run, size).values())

    longest, most = longest_sequence(config, lengths), most_tokens(config, plan, lengths)
    if needed(most) <= room:
        return most
    steps = range(-(-longest // STEP) * STEP, most, STEP)
    fitting = bisect_right(steps, room, key=needed)
    return steps[fitting - 1] if fitting else longest


def write_limit(output: Path, tokens: int) -> None:
    """Let the next start of the training use at most that many tokens per pass. Several processes may call it."""
    temporary = output / f"{FILE}.{socket.gethostname()}-{os.getpid()}.tmp"
    temporary.write_text(str(min(tokens, read_limit(output) or tokens)))
    publish(temporary, output / FILE)


def read_limit(output: Path) -> int | None:
    """Return what `write_limit` wrote; None if memory has not run out."""
    file = output / FILE
    return int(file.read_text()) if file.exists() else None
