from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_core.rollout.transformers import TransformersEngine


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token ends a completion: each is cut off."""
    original = TransformersEngine.__init__

    def without_ends(self: TransformersEngine, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        self.end_ids = torch.tensor([-1])

    monkeypatch.setattr(TransformersEngine, "__init__", without_ends)
