"""The plan of a warm start: the same arithmetic, with demonstrations as groups of one."""

from __future__ import annotations

from dataclasses import replace

from grpo_core.config.run import RunConfig
from grpo_core.config.warm_start import supervised
from grpo_core.errors import ConfigError
from grpo_core.planning.plan import Plan, make_plan, plan_inputs


def plan_warm_start(config: RunConfig, demonstrations: int, longest_completion: int = 1) -> Plan:
    """Compute the plan. `longest_completion`: in tokens, if it is known. Raises ConfigError if there are fewer
    demonstrations than an update takes."""
    keys = config.warm_start
    if demonstrations < keys.batch_size:
        raise ConfigError(
            f"warm_start.batch_size={keys.batch_size} with {demonstrations} demonstrations in {keys.demonstrations!r}: "
            "they do not fill one update; lower it, or add demonstrations"
        )
    inputs = plan_inputs(supervised(config, longest_completion), demonstrations)
    return make_plan(replace(inputs, has_teacher=True))  # a demonstration needs no group to compare with
