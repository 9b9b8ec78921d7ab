"""Real trainings on conversations with a random model: its turns are short, and most of them are tool calls."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from examples import tiny
from grpo_core.config.files import dump_config, parse_config
from grpo_core.config.run import RunConfig
from grpo_core.environments.calls import ToolCall, Tools
from grpo_core.environments.processes import Environments
from grpo_core.environments.setting import Setting, make_setting
from grpo_core.environments.turns import TurnFormat
from grpo_core.planning.plan import make_plan, plan_inputs
from grpo_core.rollout import loading
from tests.conftest import with_keys
from tests.grpo_core.environments.scripted import TEMPLATE

PROMPTS = 13
COUNTING = "tests.grpo_core.environments.playing:Counting"
DICE = {"environment_factory": "tests.grpo_core.environments.playing:Dice", "max_turns": 5, "max_tool_calls": 6}


def make_model(folder: Path, short_turns: bool = True, **changes: Any) -> Path:
    """A random model that writes any text, in ChatML. Every fifth token ends a turn, as an engine takes it from
    generation_config.json; without `short_turns`, the template's end token alone, so that calls can be written."""
    torch.manual_seed(0)
    tokenizer = tiny.make_tokenizer([("x", "y")], vocab_size=300, template=TEMPLATE)
    ids: dict[str, Any] = {"bos_token_id": None, "pad_token_id": tokenizer.pad_token_id}
    values = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1024,
        "initializer_range": 0.03,
        "eos_token_id": tokenizer.eos_token_id,
        **ids,
    }
    model = Qwen2ForCausalLM(Qwen2Config(**{**values, **changes}))
    ends = [tokenizer.eos_token_id, *range(20, 80 if short_turns else 20)]
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=ends, **ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def every_text_may_call(turns: TurnFormat, ids: Sequence[int], tools: Tools) -> tuple[str, list[ToolCall]]:
    """Stands in for a policy that has learnt to call tools: what it wants follows from its text, whatever that is."""
    text = turns.tokenizer.decode(ids, skip_special_tokens=False).removesuffix(turns.ends[0])
    wish = sum(text.encode())
    roll = ToolCall("roll", {"times": 1 + wish % 3})
    return text, [[], [roll], [roll], [ToolCall("roll", {}), roll]][wish % 4]


def let_any_text_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TurnFormat, "read", every_text_may_call)
    monkeypatch.setattr(TurnFormat, "problem", lambda turns: "")  # it could not write a call without an end token


def talking_values(model: Path, **keys: Any) -> dict[str, Any]:
    """A configuration that trains on conversations in seconds."""
    values = {
        "name": "talks",
        "model": {"name_or_path": str(model)},
        "data": {"train": "train.parquet", "eval": "eval.parquet"},
        "rewards": [{"function": "environment"}, {"function": "length", "weight": 0.01, "args": {"target": 30}}],
        "environment": DICE,
        "rollout": {"engine": "transformers", "num_generations": 4, "max_completion_length": 200},
        "train": {"per_device_train_batch_size": 8, "max_steps": 2, "learning_rate": 1e-2},
    }
    return with_keys(values, **keys)


def make_talking_run(folder: Path, values: Mapping[str, Any]) -> Path:
    """A run directory as the validate and plan stages leave it."""
    config = parse_config(dict(values))
    (folder / "dataset").mkdir(parents=True)
    for name, count in (("train", PROMPTS), ("eval", 6)):
        rows = [{"prompt": [{"role": "user", "content": f"{name} {row}"}], "answer": "1"} for row in range(count)]
        pq.write_table(pa.Table.from_pylist(rows), folder / "dataset" / f"{name}.parquet")
    (folder / "config.toml").write_text(dump_config(config))
    (folder / "plan.json").write_text(json.dumps({"plan": asdict(make_plan(plan_inputs(config, PROMPTS)))}))
    return folder


def share_environments(monkeypatch: pytest.MonkeyPatch, environments: Environments) -> None:
    """Let trainings and evaluations of this process and of its forks use the process that starts these: another takes
    seconds to import."""

    def setting(config: RunConfig, tokenizer: Any) -> Setting | None:
        own = copy.copy(environments)
        own.idle, own.taken = [], {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("grpo_core.environments.setting.Environments", lambda config: own)
            return make_setting(config, tokenizer)

    monkeypatch.setattr(loading, "make_setting", setting)


def said_in(run: Path) -> list[dict[str, Any]]:
    """All that was sampled and answered in a training, without times and the last bits of log-probabilities."""
    files = sorted((run / "training" / "completions").iterdir())
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    left_out = {"environment_seconds", "sampling_logprobs"}
    return [{name: value for name, value in row.items() if name not in left_out} for row in rows]
