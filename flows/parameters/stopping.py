"""Refuses `--stop-early` where no arm could be stopped, or not honestly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from grpo_core.evaluation.sequential import has_fallen_behind
from grpo_core.rewards.composition import range_of_sum
from tasks.data.sources import count_prompts, held_out_sources, needs_loading
from tasks.tracking.early_stop import RULE, read_rule, trainings_of

if TYPE_CHECKING:
    from flows.parameters.arms import Arm

ENOUGH_LOOKS, ENOUGH_PROMPTS = 100, 200  # an arm that is behind at all of them is stopped, whatever the number of arms


def refuse_stopping(sweep: str, arms: Sequence[Arm]) -> None:
    """Raises ConfigError if it could not be told, or not honestly, that an arm falls behind, and if the sweep has
    stopped arms among others before: the probability of stopping one wrongly is spent once."""
    if "seed" in arms[0].values:
        raise ConfigError(
            "--stop-early with several seeds: the seeds of a setting are averaged, and of those that are left after "
            "some were stopped the mean is too good; leave out one of the two"
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
            f"--stop-early: no range is known of the rewards {', '.join(unbounded)}, so nothing bounds how far a few "
            "prompts can move the mean; give each its range = [lowest, highest], or a clip"
        )
    level = 1 - arms[0].config.evaluation.confidence
    _refuse_in_vain(arms, level)
    rule, trainings = read_rule(sweep), trainings_of([arm.config for arm in arms])
    if rule and ([*rule["trainings"].items()], rule["level"]) != ([*trainings.items()], level):
        raise ConfigError(
            f"--stop-early: the sweep {sweep} has stopped arms by the level {rule['level']:.2g} already, among other "
            f"arms or other trainings of them ({RULE} in its folder); by the same level again, arms that are as good "
            "would be stopped too often. Give the sweep another --name, or leave out --stop-early"
        )


def _refuse_in_vain(arms: Sequence[Arm], level: float) -> None:
    """Raises ConfigError if no arm would be stopped, were its reward the lowest and that of the others the highest."""
    looks = [_looks(arms, place) for place in range(1, len(arms))]
    if not any(map(any, looks)):
        raise ConfigError(
            "--stop-early: no arm is evaluated, before its last update, after an update after which an arm before it "
            "is evaluated too: none could be stopped. Give all arms the same train.eval_steps, below their updates "
            f"({arms[-1].plan.max_steps:,} updates, train.eval_steps = {arms[-1].config.train.eval_steps})"
        )

    def stops(prompts: int) -> bool:
        worst = np.full(prompts, -1.0)
        return any(
            has_fallen_behind([[worst] * count for count in of_arm], place, len(arms) - 1, 1.0, level)
            for place, of_arm in enumerate(looks, start=1)
        )

    prompts = _held_out_prompts(arms[0].config)
    if not stops(prompts):
        enough = next((count for count in range(prompts, ENOUGH_PROMPTS) if stops(count)), ENOUGH_PROMPTS)
        raise ConfigError(
            f"--stop-early: with {prompts} held-out prompts and {len(arms)} arms, none could be stopped, even if its "
            f"reward were the lowest on every prompt; hold out {enough} prompts or more, or leave out --stop-early"
        )


def _looks(arms: Sequence[Arm], place: int) -> list[int]:
    """For each look at an arm, how many arms before it are evaluated after the same update."""
    arm = arms[place]
    updates = range(arm.config.train.eval_steps or 1, arm.plan.max_steps, arm.config.train.eval_steps or 1)
    return [sum(_is_evaluated(it, update) for it in arms[:place]) for update in itertools.islice(updates, ENOUGH_LOOKS)]


def _is_evaluated(arm: Arm, update: int) -> bool:
    """Whether the arm's training is evaluated after this update, as it is after its last."""
    last = arm.plan.max_steps
    return update == last or (update < last and update % (arm.config.train.eval_steps or 1) == 0)


def _held_out_prompts(config: RunConfig) -> int:
    sources = held_out_sources(config.data)
    if any(needs_loading(source.data) for source in sources):
        return ENOUGH_PROMPTS
    return min(sum(map(count_prompts, sources)), ENOUGH_PROMPTS)
