"""Refuses `--stop-early` if no arm could be stopped, or only by an invalid test."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from flows.parameters.arms import Arm
from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from grpo_core.evaluation.sequential import has_fallen_behind
from grpo_core.rewards.composition import range_of_sum
from tasks.data.groups import count_groups
from tasks.data.sources import count_prompts, held_out_sources, load_source, needs_loading, with_needed_columns
from tasks.tracking.early_stop import RULE, read_rule, shared_level, trainings_of

ENOUGH_LOOKS, ENOUGH_UNITS = 100, 200  # an arm that is behind at all of them is stopped, whatever the number of arms


def refuse_stopping(sweep: str, arms: Sequence[Arm]) -> None:
    """Raises ConfigError if no valid test could show that an arm falls behind, or if the sweep has stopped other arms
    before: the probability of stopping an arm wrongly can be spent only once."""
    if "seed" in arms[0].values:
        raise ConfigError(
            "--stop-early with several seeds: the seeds of a setting are averaged, and once some are stopped, the mean "
            "of the others is too good; leave out one of the two"
        )
    if file := arms[0].config.model.gguf_file:
        raise ConfigError(
            f"--stop-early with model.gguf_file = {file!r}: arms are compared by the checkpoint that is made of it; "
            "name that checkpoint, in bases/ of the storage after a first run, in model.name_or_path"
        )
    for arm in arms:
        if not arm.config.train.eval_steps:
            raise ConfigError(
                f"--stop-early: arm {arm.label} is not evaluated while it trains; set train.eval_steps, such as --set "
                "train.eval_steps=10"
            )
    unbounded = [repr(it.name) for it in arms[0].config.rewards if not all(map(math.isfinite, range_of_sum([it])))]
    if unbounded:
        raise ConfigError(
            f"--stop-early: the range of the rewards {', '.join(unbounded)} is unknown, so a few prompts could move "
            "the mean by any amount; give each its range = [lowest, highest], or a clip"
        )
    level = shared_level(arms[0].config.evaluation.confidence)
    _refuse_if_none_can_stop(arms, level)
    rule, trainings = read_rule(sweep), trainings_of([arm.config for arm in arms])
    if rule and ([*rule["trainings"].items()], rule["level"]) != ([*trainings.items()], level):
        raise ConfigError(
            f"--stop-early: the sweep {sweep} has already stopped arms at level {rule['level']:.2g}, with other arms "
            f"or other trainings of them ({RULE} in its folder); using that level again would stop equally good arms "
            "too often. Give the sweep another --name, or leave out --stop-early"
        )


def _refuse_if_none_can_stop(arms: Sequence[Arm], level: float) -> None:
    """Raises ConfigError if no arm would be stopped even with the lowest reward while all others have the highest."""
    looks = [_earlier_arms_at_looks(arms, place) for place in range(1, len(arms))]
    if not any(map(any, looks)):
        raise ConfigError(
            "--stop-early: before its last update, no arm is evaluated at an update at which an earlier arm is too, so "
            "none could be stopped. Give all arms the same train.eval_steps, below their number of updates "
            f"({arms[-1].plan.max_steps:,} updates, train.eval_steps = {arms[-1].config.train.eval_steps})"
        )

    def stops(units: int) -> bool:
        worst = np.full(units, -1.0)
        return any(
            has_fallen_behind([[worst] * count for count in of_arm], place, len(arms) - 1, 1.0, level)
            for place, of_arm in enumerate(looks, start=1)
        )

    units = _held_out_units(arms[0].config)
    if not stops(units):
        unit = "groups of prompts" if arms[0].config.evaluation.group_column else "prompts"
        enough = next((count for count in range(units, ENOUGH_UNITS) if stops(count)), ENOUGH_UNITS)
        raise ConfigError(
            f"--stop-early: with {units} held-out {unit} and {len(arms)} arms, none could be stopped, even if its "
            f"reward were the lowest on every prompt; hold out {enough} {unit} or more, or leave out --stop-early"
        )


def _earlier_arms_at_looks(arms: Sequence[Arm], place: int) -> list[int]:
    """Number of earlier arms evaluated after the same update, for each evaluation of an arm."""
    arm = arms[place]
    updates = range(arm.config.train.eval_steps or 1, arm.plan.max_steps, arm.config.train.eval_steps or 1)
    return [sum(_is_evaluated(it, update) for it in arms[:place]) for update in itertools.islice(updates, ENOUGH_LOOKS)]


def _is_evaluated(arm: Arm, update: int) -> bool:
    """True if the arm's training is evaluated after this update, as always after the last."""
    last = arm.plan.max_steps
    return update == last or (update < last and update % (arm.config.train.eval_steps or 1) == 0)


def _held_out_units(config: RunConfig) -> int:
    """Number of held-out prompts, or of their groups; ENOUGH_UNITS if it is more or can only be counted later."""
    sources = held_out_sources(config.data)
    if any(needs_loading(source.data) for source in sources.values()):
        return ENOUGH_UNITS
    if (column := config.evaluation.group_column) is None:
        return min(sum(map(count_prompts, sources.values())), ENOUGH_UNITS)
    parts = with_needed_columns({name: load_source(source) for name, source in sources.items()}, config)
    if any(column not in rows.columns for rows in parts.values()):  # validate says what is missing
        return ENOUGH_UNITS
    return min(count_groups(column, parts)["eval"], ENOUGH_UNITS)
