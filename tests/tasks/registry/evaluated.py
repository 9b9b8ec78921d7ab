"""A run with an evaluation, and a version of it, as the stage register makes one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from mlflow.models import Model
from safetensors.torch import load_file, save_file

from flows.serving.model_server import Version
from grpo_core.config.files import load_config
from grpo_core.evaluation.run import evaluate
from grpo_core.system.tables import read_parquet
from tasks.registry.agreement import Agreement
from tasks.registry.answering import OPENAI, answering_of
from tasks.registry.model_version import Example, _write
from tests.conftest import config_values, make_model, make_run

TEMPLATE = "{% for each in messages %}{{ each['content'] }}{% endfor %}{{ sign }}"  # no digit, no sign of its own


def evaluated_run(folder: Path, *, conversational: bool = False, **sections: Any) -> Path:
    """A run whose trained policy is a random model, with its evaluation."""
    base = make_model(folder / "base")
    values = {**config_values(base, folder, stop=["7"], max_completion_length=8), **sections}
    if conversational:
        tokenizer = json.loads((base / "tokenizer_config.json").read_text())
        (base / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "chat_template": TEMPLATE}))
        values["data"] |= {"chat_template_kwargs": {"sign": "="}, "system_prompt": "1+"}
    run = make_run(folder / "run", values)
    if conversational:
        held_out = pq.read_table(run / "dataset" / "eval.parquet")
        asked = [
            [{"role": "system", "content": "1+"}, {"role": "user", "content": it.as_py()}] for it in held_out["prompt"]
        ]
        table = held_out.set_column(held_out.column_names.index("prompt"), "prompt", pa.array(asked))
        pq.write_table(table, run / "dataset" / "eval.parquet")
    torch.manual_seed(1)
    trained = make_model(run / "training" / "model")
    weights = load_file(trained / "model.safetensors")
    save_file(
        {name: each + 0.05 * torch.randn_like(each) for name, each in weights.items()},
        trained / "model.safetensors",
        {"format": "pt"},
    )
    for file in base.glob("*token*"):
        shutil.copy(file, trained)
    (run / "evaluation").mkdir()
    evaluate(run, run / "evaluation")
    return run


def make_version(run: Path, folder: Path) -> Path:
    config, samples = load_config(run / "config.toml"), read_parquet(run / "evaluation" / "samples.parquet")
    prompt = samples["prompt"][0]
    prompt = prompt if isinstance(prompt, str) else prompt.to_list()
    answering = answering_of(config, conversational=not isinstance(prompt, str), tools=None)
    _write(run / "training", folder, Model(str(folder)), answering, Example(prompt, samples["trained/completion"][0]))
    return folder


def served_version(run: Path, folder: Path) -> Version:
    """As `grpo serve-model` finds it."""
    chat = not isinstance(read_parquet(run / "evaluation" / "samples.parquet")["prompt"][0], str)
    answering = answering_of(load_config(run / "config.toml"), conversational=chat, tools=None)
    sampling = {OPENAI[name]: value for name, value in answering.sampling.items()}
    return Version("sums", "1", folder / "model", sampling, answering.settings)


def reward_change(run: Path, found: Agreement) -> float:
    """By hand: numeric_match, and half of length with target 3; a character is a token, and there is an end token."""
    rows = pq.read_table(run / "dataset" / "eval.parquet")["answer"].to_pylist()

    def reward(text: str, row: int) -> float:
        return float(text == rows[row]) + 0.5 * max(0.0, 1.0 - abs(len(text) + 1 - 3) / 3)

    gains = [reward(it["served"], it["row"]) - reward(it["evaluated"], it["row"]) for it in found.differing]
    return sum(gains) / found.compared
