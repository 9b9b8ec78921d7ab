from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import make_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer makes a training a fifth cheaper. What goes layer by layer is tested with two: caches, packed rows,
    recomputing, sharding."""
    return make_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)
