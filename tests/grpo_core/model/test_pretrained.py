"""No Python code of a model runs, even where a person at a terminal could be asked whether it may."""

from __future__ import annotations

import ast
import json
import os
import pty
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LOAD = """
import sys
from grpo_core.config.inputs import ModelConfig
from tasks.data.lengths import load_tokenizer_and_context
load_tokenizer_and_context(ModelConfig(name_or_path=sys.argv[1]))
"""


@pytest.mark.slow
def test_at_a_terminal_too_the_code_of_a_model_is_neither_run_nor_asked_for(tmp_path: Path, model_folder: Path) -> None:
    pytest.importorskip("polars")  # which the other process needs
    base, marker = Path(shutil.copytree(model_folder, tmp_path / "base")), tmp_path / "ran"
    (base / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    config = json.loads((base / "config.json").read_text())
    own = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.Model", None]}
    (base / "config.json").write_text(json.dumps({**config, "model_type": "evil", "auto_map": own}))
    ours, theirs = pty.openpty()
    os.write(ours, b"y\n" * 9)
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(base)], stdin=theirs, capture_output=True, text=True, env=environment, cwd=ROOT
    )
    os.close(theirs)
    os.close(ours)
    said = done.stdout + done.stderr
    assert not marker.exists() and "Do you wish to run" not in said
    assert "needs Python code of its own, and no code of a model runs here" in said
    assert "trust_remote_code=True" not in said.splitlines()[-1]


def _calls() -> Iterator[tuple[str, ast.Call, ast.Attribute]]:
    """Calls of a method, in all that is installed, with the file that each stands in."""
    for room in ("grpo_core", "tasks", "flows"):
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    yield file.relative_to(ROOT).as_posix(), node, node.func


@pytest.mark.slow
def test_every_model_and_tokenizer_is_loaded_by_the_one_helper() -> None:
    loading = [
        (file, ast.unparse(called.value), {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords})
        for file, call, called in _calls()
        if called.attr in ("from_pretrained", "from_config") and ast.unparse(called.value) != "GenerationConfig"
    ]
    helper = "grpo_core/model/pretrained.py"
    without_ours = {"tasks/registry/answering_model.py": 3, "tasks/publishing/llm_compressor.py": 2}
    assert Counter(file for file, *_ in loading) == {helper: 2, **without_ours}
    assert all(keywords["trust_remote_code"] == "False" for *_, keywords in loading)
