"""An engine's answer in the order in which it was asked."""

from __future__ import annotations

from collections.abc import Iterable

from grpo_core.rollout.types import Completion, Finished


def sampled(steps: Iterable[list[Finished]]) -> list[Completion]:
    """All completions, a request's own next to each other; each request finishes once."""
    finished = [entry for step in steps for entry in step]
    assert sorted(number for number, _ in finished) == list(range(len(finished)))
    return [completion for _, completions in sorted(finished) for completion in completions]
