"""What a run does in a slower or other way than it would with other models or on other machines, and why."""

from __future__ import annotations

from grpo_core.model.policy import Policy
from grpo_core.rollout.types import Engine


def fallbacks(engine: Engine | None, policy: Policy | None = None) -> list[str]:
    """Sentences to print once, one per fall-back: of the policy's passes, then of sampling."""
    return [*(policy.notes if policy else []), *(engine.notes if engine else [])]
