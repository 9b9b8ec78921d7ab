"""Lineage keys: a stage's output is up to date as long as everything that it depends on is the same.

A key is a hash over exactly that: the stage's part of the configuration, the parts of the stages before it, the content
of data and base model, the reward functions' source, the version of grpo_core.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from grpo_core.config.run import RunConfig
from tasks.stages.parts import Named, Parts, key_of
from tasks.stages.table import stages_of

DIGITS = 12  # of a hash that people read


def lineage_keys(config: RunConfig) -> dict[str, str]:
    """The key of each stage, in the order in which they run."""
    return {stage: key_of(inputs) for stage, inputs in lineage_inputs(config).items()}


def lineage_inputs(config: RunConfig) -> dict[str, Named]:
    """What the output of each stage depends on, by name."""
    parts = Parts(config)
    return {stage.name: stage.depends_on(parts) for stage in stages_of(config)}


def what_changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The names under which two `lineage_inputs` of a stage differ; `before` may have been read from JSON."""
    now = json.loads(json.dumps(after))
    return [
        name for name in {**before, **now} if before.get(name) != now.get(name) or (name in before) != (name in now)
    ]
