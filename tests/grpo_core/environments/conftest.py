from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_core.config.environment import EnvironmentConfig
from grpo_core.environments.processes import Environments
from tests.grpo_core.environments.talking import COUNTING, make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), short_turns=False)


@pytest.fixture(scope="module")
def counting() -> Iterator[Environments]:
    started = Environments(EnvironmentConfig(environment_factory=COUNTING))
    yield started
    started.close()
