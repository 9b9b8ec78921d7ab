"""Trainings on prompts with images: they sample with transformers' own probabilities, and a kill leaves no trace."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from grpo_core import run_files
from grpo_core.config.files import load_config
from grpo_core.data.images import FILE, MARK, beside
from grpo_core.data.processor import load_processor
from grpo_core.data.prompts import FileRows, Prompts
from grpo_core.data.units import number_equal, number_units
from grpo_core.evaluation.run import outcomes_key
from grpo_core.evaluation.samples import prompt_columns
from grpo_core.training.loop import train
from tests.grpo_core.training import killing
from tests.grpo_core.training.seeing_runs import PICTURES, seeing_run
from tests.grpo_core.training.training import assert_same
from tests.vision import FAMILIES

KEYS = {
    "max_steps": 4,
    "save_steps": 1,
    "num_iterations": 2,
    "beta": 0.1,
    "eval_steps": 2,
    "load_best_model_at_end": True,
}
ADAPTER = {"use_peft": True, "lora_r": 4, "lora_dropout": 0.2}


def _as_shown(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row's messages with its pictures in their places, as transformers' processors take them."""
    left = iter(row["images"])
    parts: list[dict[str, Any]] = []
    for place, text in enumerate(row["prompt"][0]["content"].split(MARK)):
        parts += [{"type": "image", "image": PICTURES[next(left)]}] if place else []
        parts += [{"type": "text", "text": text}] if text else []
    return [{"role": "user", "content": parts}]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_completions_have_the_probabilities_of_transformers_processor_and_model(family: str, tmp_path: Path) -> None:
    """Of the policy that a training begins with, for its prompts and pictures."""
    from transformers import AutoModelForImageTextToText

    run = seeing_run(tmp_path, family, max_steps=1, eval_steps=1)
    train(run, run / "training")
    (held_out,) = (run / "training" / "held_out").glob("*.parquet")
    asked = pq.read_table(run / "dataset" / "eval.parquet")
    assert pq.read_table(held_out)["images"].to_pylist() == asked["images"].to_pylist()
    config = load_config(run / run_files.CONFIG)
    processor = load_processor(config.model)
    model = AutoModelForImageTextToText.from_pretrained(config.model.name_or_path, dtype=torch.float32).eval()
    rows = pq.read_table(run / "dataset" / "train.parquet").to_pylist()
    (file,) = (run / "training" / "completions").glob("*.parquet")
    seen = set()
    for record in pq.read_table(file).to_pylist():
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
        given = dict(processor.apply_chat_template(_as_shown(rows[record["row"]]), **options))
        completion, length = torch.tensor(record["completion_ids"]), given["input_ids"].shape[1]
        given["input_ids"] = torch.cat([given["input_ids"], completion[None]], 1)
        del given["attention_mask"]
        for name in ("token_type_ids", "mm_token_type_ids"):
            if name in given:
                given[name] = torch.nn.functional.pad(given[name], (0, len(completion)))
        with torch.no_grad():
            model.model.rope_deltas = None
            logits = model(**given).logits[0, length - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, completion[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(record["sampling_logprobs"]), expected, rtol=0, atol=1e-5)
        assert record["images"] == rows[record["row"]]["images"]
        seen.add(len(record["images"]))
    assert {0, 1, 2} <= seen or {1, 2} <= seen


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("keys", [{}, {"freeze_vision_tower": False}, ADAPTER], ids=["frozen", "tower", "adapter"])
def test_killed_at_random_it_ends_as_if_undisturbed(family: str, keys: dict[str, Any], tmp_path: Path) -> None:
    run = seeing_run(tmp_path, family, **KEYS, **keys)
    whole = shutil.copytree(run, tmp_path / "whole")
    assert killing.train(whole) == 0
    passes, draw = int((whole / "passes").read_text()), random.Random(f"{family} {[*keys]}")
    at = draw.randint(1, passes)
    assert killing.train(run, at) == 9
    assert killing.train(run) == 0
    assert_same(run, whole)


def test_prompts_of_one_text_beside_other_images_are_other_prompts(tmp_path: Path) -> None:
    """In an evaluation's samples, whatever numbers the images have; and other images are other outcomes."""
    runs = [seeing_run(tmp_path / name, "gemma3") for name in ("one", "other")]
    files = [run / "dataset" / "eval.parquet" for run in runs]
    asked = [{"role": "user", "content": f"{MARK}How many?"}]
    for file, numbers in zip(files, ([0, 1, 1, 2], [3, 4, 4, 5]), strict=True):
        rows = [{"prompt": asked, "images": [number], "answer": "1"} for number in numbers]
        pq.write_table(pa.Table.from_pylist(rows), file)
    images = pq.read_table(runs[1] / "dataset" / "images.parquet").to_pylist()
    images[3:6] = images[:3]  # the same images under other numbers
    pq.write_table(pa.Table.from_pylist(images, FILE), runs[1] / "dataset" / "images.parquet")
    config = load_config(runs[0] / run_files.CONFIG)
    columns = [prompt_columns("eval", Prompts(FileRows(it), [], 1, beside(it)), config) for it in files]
    assert [it["images"] for it in columns] == [[[0], [1], [1], [2]], [[3], [4], [4], [5]]]
    one, other = (it["task"] for it in columns)
    assert one == other
    assert number_equal(one).tolist() == number_units(FileRows(files[0]), config).tolist() == [0, 1, 1, 2]
    before = outcomes_key(config, {"eval": files[0]})
    images[0], images[1] = images[1], images[0]
    pq.write_table(pa.Table.from_pylist(images, FILE), runs[0] / "dataset" / "images.parquet")
    assert outcomes_key(config, {"eval": files[0]}) != before
