"""Resume a training at its newest checkpoint, or roll it back to the last healthy one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from grpo_core.errors import TrainingError
from grpo_core.planning.tokens_per_pass import read_limit
from grpo_core.training import health
from grpo_core.training.checkpoint import Checkpoints, require_same_folder
from grpo_core.training.health import Finding
from grpo_core.training.log import TrainingLog
from grpo_core.training.roll_out import arrange_epochs
from grpo_core.training.session import Session
from grpo_core.training.state import TrainingState
from grpo_core.training.weight_sync import begin_probing


def resume(session: Session, checkpoints: Checkpoints) -> TrainingState:
    """Load the newest undamaged checkpoint and return its state; without one, the state at the start."""
    config = session.config
    require_same_folder(checkpoints.directory.parent, session.accelerator)
    if session.sampler is not None:
        begin_probing(session, session.sampler)  # while both have the base's weights: a checkpoint changes them
    state = checkpoints.restore()
    if state is None:
        state = TrainingState(
            entropy_coef=config.algorithm.entropy_coef,
            max_staleness=config.rollout.max_staleness,
            rates=session.rates,
            arranged=None if config.data.curriculum.kind == "none" else {},
        )
        state = arrange_epochs(session, state)
        if health.may_roll_back(config.health):
            # Nothing older exists to go back to, whatever the first step finds.
            checkpoints.save(state, config.train.save_total_limit, healthy=True)
    limits = [session.memory.planned, state.tokens_per_pass, read_limit(checkpoints.directory.parent)]
    session.memory.tokens = min(limit for limit in limits if limit is not None)
    return state


def lower_staleness(state: TrainingState, findings: Sequence[Finding]) -> tuple[TrainingState, list[Finding]]:
    """Halve `max_staleness` if one of the findings asks for it; their messages say so. At 0 they become warnings."""
    lowered = state.max_staleness // 2

    def said(finding: Finding) -> Finding:
        if finding.action != "lower_staleness":
            return finding
        if not state.max_staleness:
            return replace(finding, action="warn", message=f"{finding.message}; rollout.max_staleness is at 0 already")
        change = f"rollout.max_staleness goes from {state.max_staleness} to {lowered}"
        return replace(finding, message=f"{finding.message}; {change}")

    asked = any(finding.action == "lower_staleness" for finding in findings)
    return replace(state, max_staleness=lowered) if asked else state, [*map(said, findings)]


def must_roll_back(session: Session, log: TrainingLog, findings: Sequence[Finding], state: TrainingState) -> bool:
    """Record the findings. True if one of them asks to roll back.

    Raises TrainingError if one of them stops the training, or if it has rolled back max_roll_backs times.
    """
    for finding in findings:
        log.finding(finding)
    stops = [finding for finding in findings if finding.action == "stop"]
    if stops:
        raise TrainingError(stops[0].message)
    roll_backs = [finding for finding in findings if finding.action == "roll_back"]
    if roll_backs and state.roll_backs >= session.config.health.max_roll_backs:
        raise TrainingError(
            f"{roll_backs[0].message}. The training is unhealthy again after {state.roll_backs} roll-backs "
            "(health.max_roll_backs), so it stops"
        )
    return bool(roll_backs)


def roll_back(session: Session, checkpoints: Checkpoints, log: TrainingLog, state: TrainingState) -> TrainingState:
    """Load the last healthy checkpoint and return its state, to go on with other samples and half the learning rate.

    A generation batch with updates left is sampled again for them. The checkpoint is written again with the number of
    roll-backs, so that a training killed later does not forget it.
    """
    restored = checkpoints.restore(healthy=True)
    if restored is None:
        raise TrainingError(
            f"no healthy, undamaged checkpoint is left under {checkpoints.directory} to roll back to; start the "
            "training from the beginning, or set the health action to 'warn' or 'stop'"
        )
    restored = replace(
        restored, rollout=None, roll_backs=state.roll_backs + 1, streaks={}, max_staleness=state.max_staleness
    )
    checkpoints.save(restored, session.config.train.save_total_limit, healthy=True)
    if session.sampler and session.sampler.lookahead:
        session.sampler.lookahead.drop_begun()  # other samples are drawn from here on
    log.rewind(restored)
    return restored
