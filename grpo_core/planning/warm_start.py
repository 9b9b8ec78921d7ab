"""The plan of a warm start: the same arithmetic, with demonstrations as groups of one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from grpo_core.config.run import RunConfig
from grpo_core.config.warm_start import supervised
from grpo_core.errors import ConfigError
from grpo_core.planning.forecast import forecast
from grpo_core.planning.hardware import Gpu
from grpo_core.planning.plan import Plan, make_plan, plan_inputs
from grpo_core.planning.shapes import PromptLengths
from grpo_core.planning.tokens_per_pass import with_tokens_per_pass
from grpo_core.planning.wall_time import WarmStart
from grpo_core.run_files import is_run
from grpo_core.system.memory import gib_text


def plan_warm_start(config: RunConfig, demonstrations: int, longest_completion: int = 1) -> Plan:
    """Compute the plan. `longest_completion`: in tokens, if it is known. Raises ConfigError if there are fewer
    demonstrations than an update takes."""
    keys = config.warm_start
    if demonstrations < keys.batch_size:
        what, more = f"demonstrations in {keys.source!r}", "add demonstrations"
        if keys.from_probe:
            what, more = "right completions of the probe", f"raise data.curriculum.probe={config.data.curriculum.probe}"
        elif is_run(keys.source or ""):
            what, more = f"right completions in the run {keys.source!r}", "name another run"
        raise ConfigError(
            f"warm_start.batch_size={keys.batch_size} with {demonstrations} {what}: they do not fill one update; lower "
            f"it, or {more}"
        )
    inputs = plan_inputs(supervised(config, longest_completion), demonstrations)
    return make_plan(replace(inputs, has_teacher=True))  # a demonstration needs no group to compare with


@dataclass(frozen=True)
class Sizes:
    """Number of the demonstrations, and their tokens with their prompts; `longest_completion` without."""

    rows: int
    longest: int
    longest_completion: int
    mean: float


def describe_warm_start(
    config: RunConfig, demonstrations: int, sizes: Sizes | None, gpu: Gpu | None
) -> tuple[str, WarmStart | None]:
    """What the warm start will do and, if the demonstrations' sizes are known, what it takes, in a sentence and for the
    wall time. Raises ConfigError if there are too few, or one is longer than train.max_tokens_per_pass.

    `config`: with the precision that its device has.
    """
    plan = plan_warm_start(config, demonstrations, sizes.longest_completion if sizes else 1)
    said = f"{plan.max_steps:,} updates of {plan.effective_batch_size} demonstrations before the training"
    if sizes is None:
        return f"warm start: {'at most ' * config.warm_start.from_probe}{said}", None
    said = f"warm start: {said}"
    own, others = supervised(config, sizes.longest_completion), sizes.longest - sizes.longest_completion
    lengths = PromptLengths(max(sizes.mean - sizes.longest_completion, 0), others, "of the demonstrations")
    plan = with_tokens_per_pass(own, plan, lengths, gpu)
    said += f", about {plan.completions * sizes.mean:,.0f} tokens"
    memory = forecast(own, plan, lengths, None, [], gpu).get("memory", {}) if gpu else {}
    if "peak_memory_gib" in memory:
        said += f", {gib_text(memory['peak_memory_gib'])} per GPU"
    said = "; ".join([said, *(memory[name] for name in ["warning"] if name in memory)])
    return said, WarmStart(own, plan, sizes.mean)
