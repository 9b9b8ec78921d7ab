from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from grpo_core.rewards.builtin.judge import judge
from grpo_core.rollout.transformers_engine import TransformersEngine
from tests.conftest import config_values, make_model


@pytest.fixture
def values(model_folder: Path, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A configuration that trains for a few updates in seconds."""
    yield config_values(model_folder, tmp_path)
    AcceleratorState._reset_state(reset_partial_state=True)  # the next training of this process has its own precision


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token ends a completion: each is cut off."""
    original = TransformersEngine.__init__

    def without_ends(self: TransformersEngine, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        self.end_ids = torch.tensor([-1])

    monkeypatch.setattr(TransformersEngine, "__init__", without_ends)


@pytest.fixture(scope="session")
def smooth_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights so small that a float32 gradient is 5e-7 from that of float64; with `model_folder`'s it is 4e-6."""
    return make_model(tmp_path_factory.mktemp("smooth"), initializer_range=0.03)


@pytest.fixture
def graded(tmp_path: Path) -> Any:
    """The rewards of completions of the prompt "p"."""

    def run(url: str, *completions: str, **arguments: Any) -> list[float | None]:
        keys = {"model": "m", "base_url": url, "cache": str(tmp_path / "cache"), "max_retries": 0, **arguments}
        return asyncio.run(judge(["p"] * len(completions), list(completions), **keys))

    return run
