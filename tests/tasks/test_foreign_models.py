"""Models of others that no training can use, or not with these prompts, are refused before there is one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoTokenizer

from grpo_core.config.files import parse_config
from grpo_core.config.inputs import ModelConfig
from grpo_core.errors import ConfigError
from grpo_core.model.loading import load_model
from grpo_core.planning.adapter import check_adapter
from grpo_core.training.loop import train
from tasks.data.lengths import ModelError, load_tokenizer_and_context
from tasks.validate import refusal, screen
from tests.conftest import config_values, make_model, make_run, write_sums


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.mark.parametrize("method", ["compressed-tensors", "gptq", "awq", "fp8", "mxfp4", "bitsandbytes"])
@pytest.mark.parametrize("in_text", [False, True])
def test_a_base_whose_saved_weights_are_quantised_is_refused(folder: Path, method: str, in_text: bool) -> None:
    """By the plan and the checks of places, which read its config.json; by validate; by whatever loads it."""
    quantised: dict[str, Any] = {"quantization_config": {"quant_method": method}}
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | ({"text_config": quantised} if in_text else quantised)))
    model = ModelConfig(name_or_path=str(folder))
    refusals = {
        ConfigError: [lambda: check_adapter(model), lambda: load_model(folder)],
        ModelError: [lambda: load_tokenizer_and_context(model)],
    }
    for kind, calls in refusals.items():
        for call in calls:
            with pytest.raises(kind, match=rf"quant_method = '{method}'.*a dequantised copy"):
                call()


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (
            "adapter_config.json",
            "is the folder of an adapter .*name the base that it is for, and the folder in model.ad",
        ),
        ("model-Q4_K_M.gguf", "holds weights as GGUF, .*convert them"),
    ],
)
def test_a_folder_that_holds_another_thing_than_a_model_is_refused(tmp_path: Path, file: str, said: str) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(ConfigError, match=said):
        check_adapter(ModelConfig(name_or_path=str(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "asked"),
    [
        ("Mixtral", {"output_router_logits": True, "num_local_experts": 4}),
        ("Qwen2", {"return_dict": False, "output_hidden_states": True}),
        ("Qwen2", {"output_attentions": True}),
    ],
)
def test_what_a_base_asks_of_passes_beside_logits_stays_out_of_the_training_and_in_the_saved_model(
    tmp_path: Path, architecture: str, asked: dict[str, Any]
) -> None:
    shape = {key: value for key, value in asked.items() if key.startswith("num_")}
    folder = make_model(tmp_path / "model", architecture, **shape)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | asked))
    run = make_run(tmp_path / "run", config_values(folder, tmp_path, max_steps=1))
    train(run, run / "training")
    AcceleratorState._reset_state(reset_partial_state=True)
    saved = json.loads((run / "training" / "model" / "config.json").read_text())
    assert {key: saved[key] for key in asked} == asked
    output = load_model(run / "training" / "model")(input_ids=torch.arange(4)[None])
    assert output.keys() <= {"logits", "past_key_values"}


@pytest.mark.slow
@pytest.mark.parametrize(("token", "count"), [("<think>", 1), ("<think>3+4=", 1), ("3+4=", 0)])
def test_prompts_with_tokens_beyond_the_embedding_are_refused(
    folder: Path, tmp_path: Path, token: str, count: int
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(folder)
    write_sums(tmp_path / "train.parquet", 0, 20)
    write_sums(tmp_path / "eval.parquet", 20, 30)
    rows = [*pq.read_table(tmp_path / "train.parquet").to_pylist(), {"prompt": token, "answer": "7"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    screened = screen(parse_config(config_values(folder, tmp_path)))
    assert screened.refused == bool(count)
    said = refusal(screened) if count else " ".join(screened.notes)
    assert re.search(r"1 prompts hold tokens" if count else "ends the training", said)
    assert re.search(r"the embedding of .* has 15 rows, and its tokenizer 16 tokens", said)
