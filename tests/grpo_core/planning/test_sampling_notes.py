"""A plan says what sampling leaves out, and which settings of the base are not taken over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_core.config.files import parse_config
from grpo_core.planning.sampling_notes import sampling_notes
from tests.conftest import config_values


def _notes(folder: Path, **keys: Any) -> list[str]:
    return sampling_notes(parse_config(config_values(folder, folder, **keys)))


@pytest.mark.parametrize("keys", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"top_p": 0.9, "top_k": 20}])
def test_truncated_sampling_is_named_with_its_keys(tmp_path: Path, keys: dict[str, Any]) -> None:
    (note,) = _notes(tmp_path, **keys)
    named = ", ".join(f"rollout.{name} = {value:g}" for name, value in keys.items())
    assert note.startswith(f"{named}: the policy that is trained is the one that samples, without the unlikely tokens")
    assert "sampling/outside_share" in note
    (recorded,) = _notes(tmp_path, engine="recorded", recording="run", **keys)
    assert note.startswith(recorded), "on a recording, nothing is counted"
    assert "sampling/outside_share" not in recorded


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "eos_token_id": 1}, "temperature = 0.6, top_p = 0.95"),
        ({"temperature": 1.0, "top_k": None, "repetition_penalty": 1.05}, "repetition_penalty = 1.05"),
        ({"temperature": 1.0, "eos_token_id": [1, 2]}, ""),
        ([], ""),
        ({"temperature": "warm"}, ""),
    ],
)
def test_sampling_settings_of_the_base_that_are_not_taken_over_are_said(
    tmp_path: Path, content: Any, said: str
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    notes = [note for note in _notes(tmp_path) if "generation_config.json" in note]
    assert [f"has {said}, which is not taken over" in note for note in notes] == [True] * bool(said)


def test_settings_that_the_run_has_taken_over_itself_are_not_said(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    assert _notes(tmp_path, temperature=0.6) == []
    assert _notes(tmp_path / "elsewhere") == []
