"""The pages around the quickstart, command by command, in the order in which a newcomer reads them: runs, their
comparison, their rollouts, a promotion, and the use of the champion."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import fenced
from tests.conftest import EXAMPLE
from tests.e2e.commands import SECONDS
from tests.readme import ROOT, commands_of

pytestmark = pytest.mark.e2e

PAGES = [
    ROOT / "docs" / name
    for name in (
        "tutorials/quickstart.md",
        "how-to/run.md",
        "how-to/compare.md",
        "how-to/recover.md",
        "how-to/rollouts.md",
        "how-to/promote.md",
        "how-to/use.md",
    )
]
# Left out: servers and what asks them, answers to a question that is not open, versions that may be the same one.
LEFT_OUT = {"up", "schedule", "--approve", "--reject", "arithmetic@champion"}
MAY_REFUSE = {"promote"}  # whether a version is better is not known beforehand
LEAST = 20


def test_the_pages_around_the_quickstart_can_be_followed_in_their_order(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    left_out = ("PREFECT_", "MLFLOW_", "PYTHONPATH", "PYTHONSAFEPATH", "GRPO_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    database = f"sqlite:///{tmp_path}/storage/mlflow/mlflow.db"

    def do(*words: str) -> str:
        tracked = environment | ({"MLFLOW_TRACKING_URI": database} if words[0] == "mlflow" else {})
        done = subprocess.run(words, cwd=tmp_path, env=tracked, capture_output=True, text=True, timeout=SECONDS)
        allowed = {0, 1} if len(words) > 1 and words[1] in MAY_REFUSE else {0}
        assert done.returncode in allowed, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
        return done.stdout

    do("python", str(EXAMPLE))
    do("grpo", "run", "configs/quickstart.toml")  # what `make quickstart` does
    followed = [words for page in PAGES for words in commands_of(page) if words[0] in ("grpo", "mlflow")]
    followed = [words for words in followed if not LEFT_OUT & {*words}]
    assert len(followed) > LEAST
    for words in followed:
        if words[1] == "rollback":  # whatever the gate thought of the versions before, there is one to return to
            do("grpo", "promote", "arithmetic", "--version", "1", "--force")
            do("grpo", "promote", "arithmetic", "--version", "2", "--force")
        do(*words)
        if words[1:3] == ["promote", "arithmetic"] and "--force" in words:
            promoted = do("grpo", "promote", "arithmetic")
            assert "champion already" in " ".join(promoted.split())
    [code] = fenced((ROOT / "docs" / "how-to" / "use.md").read_text(), "python")
    assert re.search(r"^12\+30=", do("python", "-c", code), re.MULTILINE)
    assert (tmp_path / "champion" / "model" / "config.json").is_file()
