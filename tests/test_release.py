"""What a release has to change in several files at once."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_version_and_the_licence_are_the_same_wherever_they_are_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert f"\n## [{project['version']}] - " in (ROOT / "CHANGELOG.md").read_text()
    assert f"grpo-flows:{project['version']}-cpu" in (ROOT / "Dockerfile").read_text()
    assert f"grpo_flows-{project['version']}-" in (ROOT / "docs" / "how-to" / "wheel.md").read_text()
