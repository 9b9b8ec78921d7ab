from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from grpo_core.rollout.vllm.server_engine import VLLMServerEngine
from tests.grpo_core.rollout import asking
from tests.grpo_core.rollout.pretend_vllm import Pretended, Serving, connected, pretended


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serving:
    """Makes servers, each with room for so many completions, and an engine over them: see `pretended`, `connected`."""

    @contextmanager
    def serve(*room: int, model: Any = None, **keys: Any) -> Iterator[tuple[list[Pretended], VLLMServerEngine]]:
        with (
            pretended(*room) as servers,
            connected(tmp_path, monkeypatch, servers, model or asking.model(), **keys) as engine,
        ):
            yield servers, engine

    return serve
