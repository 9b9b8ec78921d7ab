"""What a run would do and need, as `grpo plan` and `grpo sweep` show it before anything is started. Doesn't import
torch: if no pace of training is known, another process measures it on this machine."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from flows.parameters.early_refusals import count_demonstrations, refuse_early
from grpo_core.config.files import named_modules
from grpo_core.config.run import RunConfig
from grpo_core.data.curriculum import curriculum_notes
from grpo_core.data.order import source_counts
from grpo_core.data.teacher import silent_notes, teacher_notes, unseen_notes
from grpo_core.errors import ConfigError
from grpo_core.planning.adapter import base_notes, check_adapter
from grpo_core.planning.forecast import forecast
from grpo_core.planning.hardware import capability, find_gpu, hardware_notes, name_hardware, named_gpu
from grpo_core.planning.nvidia import problem_of_driver
from grpo_core.planning.pace import NOT_VALIDATED, Pace, Throughput
from grpo_core.planning.plan import make_plan, notes, plan_inputs
from grpo_core.planning.sampling_notes import sampling_notes
from grpo_core.planning.shapes import PromptLengths
from grpo_core.planning.tokens_per_pass import with_tokens_per_pass
from grpo_core.planning.warm_start import describe_warm_start
from tasks.data.forecast_inputs import (
    Validated,
    demonstrated_sizes,
    earlier_sampling,
    first_lengths,
    read_validated,
)
from tasks.data.sources import count_prompts, list_pass_rates, training_sources
from tasks.processes.measure import check_model, measured_pace
from tasks.stages.base_model import with_checkpoint
from tasks.stages.lineage import lineage_keys
from tasks.stages.run_directory import run_folder
from tasks.stages.table import WARM_START

ASSUMED = PromptLengths(256, 256, "assumed; --prompt-tokens says better")


def describe_plan(
    config: RunConfig,
    known_prompts: int | None = None,
    prompt_tokens: int | None = None,
    pass_rates: Sequence[float] = (),
    gpu: str | None = None,
    history: bool = False,
    measure: Callable[..., Pace | str] = measured_pace,
) -> dict[str, Any]:
    """Return the plan for a configuration. `known_prompts`: the number of prompts, of data that are elsewhere; `gpu`:
    the name of another machine's GPU, "" for none; `measure`: called for the pace if no earlier run tells it. Raises
    GrpoError if the configuration is refused."""
    if prompt_tokens is not None and prompt_tokens < 1:
        raise ConfigError(f"--prompt-tokens {prompt_tokens}: a prompt has at least one token")
    refuse_early(config, known_prompts, here=gpu is None)
    say = partial(print, file=sys.stderr)
    if known_prompts is None:
        config = with_checkpoint(config, say, download=False)
        check_adapter(config.model)
        num_prompts = [count_prompts(source) for source in training_sources(config.data)]
        pass_rates = pass_rates or list_pass_rates(config.data)
    else:
        num_prompts = [known_prompts]
    inputs = plan_inputs(config, *num_prompts)
    figures = make_plan(inputs)
    hardware = find_gpu() if gpu is None else named_gpu(gpu) if gpu else None
    pace: Throughput | Pace | str | None = None
    if history:
        from tasks.tracking.earlier_runs import earlier_throughput

        pace = earlier_throughput(config, name_hardware(hardware))
    data = read_validated(run_folder(config.name))
    resolved = config.with_precision(capability(hardware))
    lengths = _prompt_lengths(config, data, prompt_tokens, reads_data=known_prompts is None)
    figures = with_tokens_per_pass(resolved, figures, lengths, hardware)
    # With the signal handler that polars installs, Ctrl-C would wait for the end of a measurement.
    signal.signal(signal.SIGINT, signal.getsignal(signal.SIGINT))
    check_model(resolved, lengths.longest if lengths is not ASSUMED else 1, hardware, say)
    if pace is None and gpu is None:
        pace = measure(resolved, figures, lengths, hardware, data.prompts if data else None, say)
    said = [*notes(inputs, figures), *curriculum_notes(config, figures), *sampling_notes(config)]
    said += [*teacher_notes(config), *unseen_notes(config), *silent_notes(config, pass_rates)]
    warm = None
    if config.warm_start.is_used and known_prompts is None:
        (stage,) = WARM_START.inputs(config)
        receipt = stage.read_receipt(run_folder(config.name))
        sizes = demonstrated_sizes(receipt)
        # The keys hash the base, and import the run's own modules, which is not done for another machine.
        if sizes and gpu is None:
            sizes = sizes if receipt["lineage_key"] == lineage_keys(config)[stage.name] else None
        elif sizes and config.warm_start.from_probe:
            sizes = None
        count = sizes.rows if sizes else count_demonstrations(config)
        text, warm = describe_warm_start(resolved, count, sizes, hardware)
        said.append(text)
    may_sample_ahead = gpu is None and config.rollout.engine == "vllm-server" and not config.environment.is_used
    forecasts = forecast(
        resolved,
        figures,
        lengths,
        pace,
        pass_rates,
        hardware,
        costs=data.costs if data else NOT_VALIDATED,
        sampling=earlier_sampling(run_folder(config.name)) if may_sample_ahead else None,
        warm=warm,
    )
    if "error" in forecasts["time"] and not history:
        elsewhere = "" if gpu else ", --gpu H200 forecasts for that GPU"
        forecasts["time"]["error"] += f"; --history looks for one in MLflow{elsewhere}"
    said += [*hardware_notes(config, hardware, named=bool(gpu)), *base_notes(config.model)]
    if gpu is None:
        said += [problem] if (problem := problem_of_driver()) else []
    elif own := sorted(named_modules(config)):
        said.append(f"planned for another machine: {', '.join(own)} read here, not imported")
    return {
        "valid": True,
        "rules": inputs.rules,
        "notes": said,
        **dataclasses.asdict(figures),
        "forecasts": forecasts,
        "sources": source_counts(figures, config.seed) if figures.sources else {},
    }


def _prompt_lengths(config: RunConfig, data: Validated | None, given: int | None, reads_data: bool) -> PromptLengths:
    if given:
        return PromptLengths(given, given, "given")
    if data:
        how = f"from the validated data of run {config.name}"
        return PromptLengths(data.mean_tokens, data.longest, how, data.longest_shown)
    if reads_data and (found := first_lengths(config)):
        return found
    return ASSUMED
