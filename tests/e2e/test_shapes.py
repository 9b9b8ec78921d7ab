"""The quickstart's task on bases of today's shapes, tiny and random, goes from validate to register."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen3_5ForConditionalGeneration,
)

from examples import tiny
from examples.arithmetic.make import make_rows
from examples.arithmetic.teach import make_tokenizer
from tests.e2e.commands import run
from tests.gguf_files import write_llama

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}


def _make_base(shape: str, folder: Path) -> None:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
    text = SIZES | tokens | {"bos_token_id": None}
    config, kind = {
        "qwen3_5": ({"text_config": text | LINEAR, "vision_config": TOWER}, AutoModelForImageTextToText),
        "falcon_h1": (text | MAMBA, AutoModelForCausalLM),
        "gpt_oss": (text | EXPERTS, AutoModelForCausalLM),
    }[shape]
    kind.from_config(CONFIG_MAPPING[shape](**config), dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _run(folder: Path, name: str, model: dict[str, Any]) -> str:
    """What `grpo run` prints on the quickstart's task, with the base in `folder`/base."""
    train, held_out = make_rows()
    tiny.write_rows(folder, train[:100], held_out[:20])
    keys = {
        "name": name,
        "model.name_or_path": folder / "base",
        "data.train": folder / "train.parquet",
        "data.eval": folder / "eval.parquet",
        "train.per_device_train_batch_size": 32,
        "train.max_steps": 3,
        "train.save_steps": 2,
        "registry.model_name": name,
        **model,
    }
    options = [option for key, value in keys.items() for option in ("--set", f"{key}={value}")]
    left_out = ("PREFECT_", "MLFLOW_", "PYTHONSAFEPATH", "GRPO_MEASURE")  # so that the plan tries the base
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
    environment = {**inherited, "GRPO_STORAGE": str(folder / "storage"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "flows.cli.main", "run", ROOT / "configs/quickstart.toml", *options]
    return run(command, folder, environment)


@pytest.mark.parametrize("shape", ["qwen3_5", "falcon_h1", "gpt_oss"])
def test_a_base_of_this_shape_goes_from_validate_to_register(shape: str, tmp_path: Path) -> None:
    _make_base(shape, tmp_path / "base")
    said = _run(tmp_path, shape, {})
    (tried,) = (tmp_path / "storage" / "tried").iterdir()
    assert json.loads(tried.read_text()) == {"refused": ""}
    folder = tmp_path / "storage" / "runs" / shape
    assert json.loads((folder / "registration.json").read_text())["model_name"] == shape
    assert json.loads((folder / "training" / "result.json").read_text())["counted"]["updates"] == 3
    AutoModelForCausalLM.from_pretrained(folder / "training" / "model")
    multimodal = "is a multimodal model (qwen3_5): its language model is trained on text" in " ".join(said.split())
    assert multimodal == (shape == "qwen3_5")
    if multimodal:
        before, after = (
            AutoModelForImageTextToText.from_pretrained(place)
            for place in (tmp_path / "base", folder / "training" / "model")
        )
        assert isinstance(after, Qwen3_5ForConditionalGeneration)
        torch.testing.assert_close(after.model.visual.state_dict(), before.model.visual.state_dict(), rtol=0, atol=0)


def test_a_gguf_file_goes_from_validate_to_register_and_is_the_same_base_the_next_time(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    write_llama(tmp_path / "base" / "small.Q8_0.gguf")
    key = {"model.gguf_file": "small.Q8_0.gguf"}
    assert "is made an ordinary checkpoint, once" in " ".join(_run(tmp_path, "gguf", key).split())
    folder = tmp_path / "storage" / "runs" / "gguf"
    assert json.loads((folder / "registration.json").read_text())["model_name"] == "gguf"
    saved = AutoModelForCausalLM.from_pretrained(folder / "training" / "model")
    assert not hasattr(saved.config, "quantization_config")
    (tmp_path / "base" / "small.Q8_0.gguf").rename(tmp_path / "base" / "other.gguf")
    assert "nothing to do" in _run(tmp_path, "gguf", {"model.gguf_file": "other.gguf"})
