from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_core.config.inputs import RewardConfig

Declare = Callable[..., Callable[..., RewardConfig]]


@pytest.fixture
def declare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Declare:
    """Writes a module of reward functions; what it returns declares one of them, with other keys."""
    monkeypatch.syspath_prepend(tmp_path)

    def written(body: str, name: str = "own_rewards") -> Callable[..., RewardConfig]:
        (tmp_path / f"{name}.py").write_text(body)
        monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        return lambda function="f", **keys: RewardConfig(**{"function": f"{name}:{function}", **keys})

    return written
