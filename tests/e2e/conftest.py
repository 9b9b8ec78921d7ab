"""`grpo up` for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.serving import Served, serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.e2e.picturing import Picture


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`grpo up` over a storage root of its own."""
    with serving(tmp_path_factory.mktemp("served")) as servers:
        yield servers


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    from tests.e2e.picturing import browser_page

    with browser_page() as page:
        yield page


@pytest.fixture(scope="module")
def picture(page: Page, tmp_path_factory: pytest.TempPathFactory) -> Picture:
    from tests.e2e.picturing import photographer

    return photographer(page, tmp_path_factory.mktemp("pictures"))
