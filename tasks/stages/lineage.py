"""Lineage keys: a stage's output is up to date as long as everything that it depends on is unchanged.

A key is a hash of exactly these dependencies: the stage's part of the configuration, the parts of the stages before it,
the content of data and base model, the source of own code, and the versions of built-in rewards, environments and of
grpo_core's behaviour. Keys at their default are left out, so a key that a later version adds makes nothing stale.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from grpo_core.config.run import RunConfig
from tasks.stages.dependencies import Named, Parts, hash_values
from tasks.stages.table import stages_of

DIGITS = 12  # of a hash, as people see it


def lineage_keys(config: RunConfig) -> dict[str, str]:
    """Lineage key of each stage, in the order in which they run."""
    return {stage: hash_values(inputs) for stage, inputs in lineage_inputs(config).items()}


def lineage_inputs(config: RunConfig) -> dict[str, Named]:
    """Values that the output of each stage depends on, by name."""
    parts = Parts(config)
    return {stage.name: stage.depends_on(parts) for stage in stages_of(config)}


def what_changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names whose values differ between two `lineage_inputs` of a stage; `before` may have been read from JSON."""
    now = json.loads(json.dumps(after))
    return [
        name for name in {**before, **now} if before.get(name) != now.get(name) or (name in before) != (name in now)
    ]
