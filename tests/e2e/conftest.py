"""`grpo up` for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving import Served, serving


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`grpo up` over a storage root of its own."""
    with serving(tmp_path_factory.mktemp("served")) as servers:
        yield servers
