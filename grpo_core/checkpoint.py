"""Everything needed to continue exactly: weights, optimizer, scheduler, RNG of every process, and where the run stands.

A checkpoint is written beside its final name and renamed, so that a killed run leaves whole checkpoints or none.
"""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from accelerate import Accelerator

from grpo_core.rollout.engine import Rollout

STATE_FILE = "progress.pt"


class CheckpointError(RuntimeError):
    """A checkpoint that does not belong to this run."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands after `updates` optimizer updates, summed over all its starts."""

    updates: int = 0
    rollouts: int = 0
    completion_tokens: int = 0
    train_seconds: float = 0.0
    rollout: Rollout | None = None  # the generation batch in use

    def with_rollout(self, rollout: Rollout) -> Progress:
        tokens = self.completion_tokens + int(rollout.completion_lengths.sum())
        return replace(self, rollouts=self.rollouts + 1, completion_tokens=tokens, rollout=rollout)

    def with_update(self, seconds: float) -> Progress:
        return replace(self, updates=self.updates + 1, train_seconds=self.train_seconds + seconds)


def save(accelerator: Accelerator, directory: Path, progress: Progress, fingerprint: str, keep: int) -> Path:
    """Write checkpoint `step-NNNNNN` under `directory`, drop all but the newest `keep`; called by every process.

    The generation batch goes with it: the next update may still read it, and its samples cannot be drawn again, since
    the policy that drew them is gone.
    """
    final = directory / f"step-{progress.updates:06d}"
    temporary = final.with_suffix(".tmp")
    accelerator.save_state(str(temporary))
    if accelerator.is_main_process:
        rollout = None if progress.rollout is None else dataclasses.asdict(progress.rollout)
        state = {**vars(progress), "rollout": rollout, "fingerprint": fingerprint}
        torch.save(state, temporary / STATE_FILE)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        temporary.rename(final)
        for old in _all(directory)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return final


def restore(accelerator: Accelerator, directory: Path, fingerprint: str) -> Progress:
    """Load the newest checkpoint under `directory` into the prepared objects; a fresh Progress when there is none.

    CheckpointError when it was written under another configuration.
    """
    if accelerator.is_main_process and directory.exists():
        for torn in directory.glob("*.tmp"):
            shutil.rmtree(torn)
    accelerator.wait_for_everyone()
    checkpoints = _all(directory)
    if not checkpoints:
        return Progress()
    newest = checkpoints[-1]
    state = torch.load(newest / STATE_FILE, weights_only=True)
    if state.pop("fingerprint") != fingerprint:
        raise CheckpointError(
            f"{newest} was written under another configuration or plan; move {directory.parent} away to start anew, "
            "or restore the configuration to continue it"
        )
    accelerator.load_state(str(newest))
    rollout = state.pop("rollout")
    return Progress(**state, rollout=None if rollout is None else Rollout(**rollout))


def _all(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("step-*") if path.suffix != ".tmp")
