"""A real Prefect server on a database of its own, and a storage root, for the tests of whole pipelines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import Served, serving


@pytest.fixture(scope="session")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Storage root of this test session, with Prefect's API running over it."""
    root = tmp_path_factory.mktemp("storage")
    os.environ["GRPO_STORAGE"] = str(root)
    from flows.serving.environment import configure

    configure()
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=180):
        yield root
    del os.environ["GRPO_STORAGE"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`grpo up` over a storage root of its own."""
    with serving(tmp_path_factory.mktemp("served")) as servers:
        yield servers
