"""The engine has the trainer's weights after each hand-over, or training stops with the step and the figure."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch import nn

from grpo_core import session
from grpo_core.data import Prompts
from grpo_core.rollout.engine import Engine
from grpo_core.rollout.transformers import TransformersEngine
from grpo_core.session import TrainingError
from grpo_core.sync import probe_sequences
from grpo_core.trainer import train
from tests import forked
from tests.conftest import make_run, with_keys


class CopyingEngine(TransformersEngine):
    """An engine with weights of its own, as vLLM has; `skipped` numbers the hand-over that is lost."""

    skipped = 0

    def sync_weights(self, model: nn.Module) -> None:
        self.syncs = getattr(self, "syncs", 0) + 1
        if self.syncs != self.skipped:
            self.model = copy.deepcopy(model)


def _with_copying_engine(monkeypatch: pytest.MonkeyPatch, skipped: int) -> None:
    def make(config: Any, path: Any, model: nn.Module, tokenizer: Any, max_length: int) -> Engine:
        engine = CopyingEngine(copy.deepcopy(model), tokenizer)
        engine.skipped = skipped
        return engine

    monkeypatch.setattr(session, "make_engine", make)


@pytest.mark.parametrize("skipped", [2, 4])
def test_a_skipped_sync_stops_the_training_with_step_and_figure(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skipped: int
) -> None:
    _with_copying_engine(monkeypatch, skipped)
    run = make_run(tmp_path / "run", values)
    with pytest.raises(TrainingError, match=rf"after step {skipped - 1}: .* away from the trainer's") as error:
        train(run, run / "training")
    found = re.search(r"are (\S+) away", str(error.value))
    assert found is not None
    assert float(found[1]) > 1e-3


def test_without_a_lost_sync_nothing_stops(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_copying_engine(monkeypatch, 0)
    run = make_run(tmp_path / "run", values)
    assert train(run, run / "training")["metrics"]["sampling/sync_drift"] < 1e-5


@pytest.mark.slow
def test_a_sync_skipped_in_vllm_stops_the_training(values: dict[str, Any], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", with_keys(values, engine="vllm"))
    with pytest.raises(TrainingError, match=r"after step 2: .* away from the trainer's"):
        forked.call(train_with_a_lost_sync, run)
    assert len((run / "training" / "metrics.jsonl").read_text().splitlines()) == 2


def train_with_a_lost_sync(run: Path) -> None:
    """Train with an engine that has weights of its own and loses the third hand-over."""
    from grpo_core.rollout import vllm

    original, calls = vllm.VLLMEngine.sync_weights, []

    def skipping(self: Any, model: nn.Module) -> None:
        calls.append(1)
        if len(calls) != 3:
            original(self, model)

    vllm.share, vllm.VLLMEngine.sync_weights = lambda copies, model: False, skipping
    train(run, run / "training")


def test_the_probe_is_fixed_short_and_has_a_score_for_a_prompt_of_one_token() -> None:
    prompts = Prompts([{}] * 20, [[n] * (1 + 40 * n) for n in range(20)])
    sequences = probe_sequences(prompts, 99, length=64)
    assert sequences == probe_sequences(prompts, 99, length=64)
    assert len(sequences) == 4
    assert sequences[0] == [0, 99]
    assert all(2 <= len(ids) <= 64 and ids[-1] == 99 for ids in sequences)


def test_the_probe_of_a_tokenizer_without_an_end_token_is_of_the_prompts_tokens() -> None:
    prompts = Prompts([{}] * 2, [[7], [4, 5, 6]])
    assert probe_sequences(prompts, None, length=3) == [[7, 7], [5, 6, 4]]


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.slow)])
def test_prompts_and_completions_of_one_token_are_probed_too(
    values: dict[str, Any], tmp_path: Path, engine: str
) -> None:
    values["rewards"] = [{"function": "tests.grpo_core.test_trainer:parity"}]
    run = make_run(tmp_path / "run", with_keys(values, engine=engine, max_completion_length=1, max_steps=2))
    pq.write_table(pa.table({"prompt": [str(i % 10) for i in range(24)]}), run / "dataset" / "train.parquet")
    steps = forked.train(run)
    assert [step["sampling/sync_drift"] < 1e-4 for step in steps] == [True] * 2


@pytest.mark.slow
def test_vllm_follows_an_adapter_in_a_training_whose_completions_are_one_token_long(
    values: dict[str, Any], tmp_path: Path
) -> None:
    """The probe is then as long as the longest sequence that the engine takes."""
    values["rewards"] = [{"function": "tests.grpo_core.test_trainer:parity"}]
    keys = {"engine": "vllm", "max_completion_length": 1, "use_peft": True, "max_steps": 3}
    run = make_run(tmp_path / "run", with_keys(values, **keys))
    steps = forked.train(run)
    assert [step["sampling/sync_drift"] < 1e-4 for step in steps] == [True] * 3
    assert all(step["grad_norm"] > 0 for step in steps)
