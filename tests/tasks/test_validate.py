"""What validate and the plan refuse or say before there is a training: of models of others that none can use, or not
with these prompts, of a promotion that is to follow, and on which GPU rewards are tried."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
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
from grpo_core.planning.nvidia import list_devices
from grpo_core.training.loop import train
from tasks import validate
from tasks.data.lengths import ModelError, load_tokenizer_and_context
from tasks.processes.gpus import locks as gpu_locks
from tasks.screen import refusal
from tasks.stages.run import Context
from tasks.validate import deciding_metric_of, too_few_to_promote
from tests.conftest import config_values, make_model, make_run, write_sums
from tests.nvidia_smi import put_nvidia_smi
from tests.rows import screen

GRADES = {"function": "char_length"}  # without a lowest value
RIGHT = {"function": "numeric_match"}


@pytest.mark.parametrize(
    ("rewards", "zero_or_one", "num_prompts", "promotion", "warns"),
    [
        ([GRADES], [], 199, {}, True),
        ([GRADES], [], 200, {}, False),
        ([{**GRADES, "clip": [-50, 0]}], [], 10, {}, False),
        ([{"function": "my_rewards:f"}], ["f"], 10, {}, False),
        ([{"function": "my_rewards:f"}], [], 10, {}, True),
        ([{"function": "my_rewards:f", "range": [-9, 0]}], [], 10, {}, False),
        ([RIGHT, GRADES], ["numeric_match"], 10, {}, False),
        ([RIGHT, GRADES], ["numeric_match"], 10, {"metric": "reward"}, True),
        ([GRADES], [], 10, {"metric": "accuracy"}, False),
        ([GRADES], [], 10, {"set": "other"}, False),
    ],
)
def test_held_out_prompts_that_cannot_promote_a_grade_without_range_are_named_before_the_training(
    tmp_path: Path,
    rewards: list[dict[str, Any]],
    zero_or_one: list[str],
    num_prompts: int,
    promotion: dict[str, Any],
    warns: bool,
) -> None:
    sets = {"sets": [{"name": "other", "data": "other.parquet"}]}
    values = {**config_values(tmp_path, tmp_path), "rewards": rewards, "promotion": promotion, "evaluation": sets}
    config = parse_config(values)
    metric = deciding_metric_of(config, zero_or_one)
    warnings = too_few_to_promote(config, metric, {"held-out": num_prompts, "other": 300})
    assert bool(warnings) == warns
    if warns:
        name = rewards[-1]["function"].rpartition(":")[2]
        assert f"the range of '{name}' is unknown: with {num_prompts} prompts in 'held-out'" in warnings[0]


@pytest.mark.slow
def test_rewards_are_tried_on_a_gpu_that_is_free_or_on_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []

    def try_rewards(command: list[str], *_: Any, **__: Any) -> None:
        seen.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        Path(command[-1]).write_text("{}")

    said: list[str] = []
    monkeypatch.setattr(validate, "run_process", try_rewards)
    log = SimpleNamespace(info=said.append, warning=lambda text, *words: said.append(text % words))
    monkeypatch.setattr(validate, "get_run_logger", lambda: log)
    monkeypatch.setattr(gpu_locks, "LOCKS", tmp_path / "locks")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    context = Context(parse_config(config_values(tmp_path, tmp_path)), tmp_path, tmp_path)
    validate._rehearse(context)
    list_devices.cache_clear()
    put_nvidia_smi(tmp_path, 1)
    validate._rehearse(context)
    assert (seen, said) == ([None, "0"], [])
    held = gpu_locks.take_gpus(1, said.append)
    validate._rehearse(context)
    os.close(held["0"])
    assert seen[2:] == [""]
    assert said == [
        "rewards and environments are tried without a GPU, since none is free: 1 of 1 GPUs are locked by stages (in "
        f"{gpu_locks.LOCKS})"
    ]


@pytest.mark.slow
def test_prompts_that_choose_the_model_may_not_judge_it_from_another_file(model_folder: Path, tmp_path: Path) -> None:
    for name, first, last in [("train", 10, 40), ("eval", 60, 70), ("final", 68, 80)]:
        write_sums(tmp_path / f"{name}.parquet", first, last)
    values = config_values(model_folder, tmp_path, load_best_model_at_end=True, eval_steps=1, save_steps=1)
    values["evaluation"]["sets"][0]["data"] = str(tmp_path / "final.parquet")
    assert screen(parse_config(values)).shape == [
        "2 prompts of eval-final are in eval too: the training chooses its model by them, so they cannot also decide "
        "on its promotion ('final'); leave them out of one of the two"
    ]
    write_sums(tmp_path / "final.parquet", 70, 80)
    assert not screen(parse_config(values)).refused


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
        ("model-Q4_K_M.gguf", "holds weights as GGUF: name its folder, and the file in model.gguf_file"),
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
