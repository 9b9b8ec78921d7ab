"""What a training does about its vLLM servers, without a server: tests/grpo_core/test_vllm_server.py has real ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from grpo_core.rollout import vllm_serve

ROOT = Path(__file__).parents[2]


def test_both_sets_of_requirements_hold_the_release_that_weights_are_sent_by() -> None:
    pinned = [(ROOT / "requirements" / name).read_text() for name in ("gpu.txt", "cpu.txt")]
    found = [re.search(r"^vllm(?:-cpu)?==(\S+)$", text, re.MULTILINE) for text in pinned]
    gpu, cpu = (match and match[1] for match in found)
    assert gpu == cpu
    assert gpu and gpu.startswith(f"{vllm_serve.VLLM}.")


def test_another_vllm_is_refused_with_the_one_that_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert vllm_serve.wrong_vllm() == ""
    monkeypatch.setattr(vllm_serve, "VLLM", "0.1")
    assert re.search(r"needs vLLM 0\.1, installed is 0\.32", vllm_serve.wrong_vllm())
