"""A machine with PyTorch and little more trains: nothing else is imported, and nothing else needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_core.config.files import load_config
from tests.conftest import config_values, make_model, make_run, make_tokenizer, with_keys

pytestmark = pytest.mark.served

# As docs/how-to/gpus.md has it; tokenizers and triton come with transformers and torch.
BARE = ["accelerate", "jaxtyping", "numpy", "psutil", "pyarrow", "pydantic", "safetensors", "tomli-w", "torch"]
BARE += ["transformers", "tokenizers", "triton"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"


def _with_conversations(run: Path, tokenizer: Any) -> Path:
    """The run with its prompts as conversations, which the tokenizer of its model has a template for then."""
    for file in (run / "dataset").iterdir():
        rows = pq.read_table(file).to_pylist()
        talks = [{**row, "prompt": [{"role": "user", "content": row["prompt"].rstrip("=")}]} for row in rows]
        pq.write_table(pa.Table.from_pylist(talks), file)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(load_config(run / "config.toml").model.name_or_path)
    return run


def test_trainings_import_pytorch_s_packages_alone_and_an_evaluation_polars_and_scipy_too(
    values: dict[str, Any], tmp_path: Path
) -> None:
    """With all that a training may do by itself; one goes on from a checkpoint, one trains an adapter."""
    keys = {"eval_steps": 2, "save_steps": 2, "optim": "adamw_8bit", "stop": ["7"]}
    values["data"]["curriculum"], values["evaluation"] = {"kind": "easy_to_hard"}, {"accuracy_reward": "length"}
    values["rewards"] += [{"function": "repetition", "weight": -0.1, "isolated": True}]
    run = make_run(tmp_path / "run", with_keys(values, **keys))
    (again := tmp_path / "again").mkdir()
    (again / "checkpoints").symlink_to(run / "training" / "checkpoints")
    talking = config_values(make_model(tmp_path / "model"), tmp_path, use_peft=True, beta=0.1, num_iterations=2)
    chat = _with_conversations(make_run(tmp_path / "chat", talking), make_tokenizer())
    steps = [
        (BARE, ["grpo_core.train", str(run)]),
        ([], ["grpo_core.train", str(run), "--output", str(again)]),
        (["peft"], ["grpo_core.train", str(chat)]),
    ]
    if evaluates := find_spec("polars") is not None:  # not so on a bare machine
        steps.append((["polars", "scipy"], ["grpo_core.evaluate", str(run)]))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, "-m", "tests.grpo_core.training.bare"]
    done = subprocess.run(command, input=json.dumps(steps), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads((again / "result.json").read_text())["resumed_at_step"] == 2
    assert (chat / "training" / "adapter").exists()
    assert (run / "evaluation" / "samples.parquet").exists() == evaluates
