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

from benchmarks.lost_weights import measure
from benchmarks.planted_losses import LOSSES
from grpo_core.errors import TrainingError
from grpo_core.rollout.transformers_engine import TransformersEngine
from grpo_core.rollout.types import Engine
from grpo_core.training import session
from grpo_core.training.loop import train
from grpo_core.training.state import TrainingState
from grpo_core.training.weight_sync import begin_probing, sync_weights
from tests import forked
from tests.conftest import make_run, with_keys

pytestmark = pytest.mark.served


class CopyingEngine(TransformersEngine):
    """An engine with weights of its own, as vLLM has; `skipped` numbers the hand-over that is lost."""

    skipped = 0

    def sync_weights(self, model: nn.Module) -> str:
        self.syncs = getattr(self, "syncs", 0) + 1
        if self.syncs != self.skipped:
            self.model = copy.deepcopy(model)
        return "copied"


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


def test_a_skipped_sync_in_bfloat16_at_a_usual_learning_rate_stops_the_training_also_when_resumed(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"mixed_precision": "bf16", "learning_rate": 1e-6, "save_steps": 2}
    run = make_run(tmp_path / "run", with_keys(values, **keys))
    unchanged = "log-probabilities of the probe batch have not changed at all, while the trainer's have moved by"
    _with_copying_engine(monkeypatch, 4)
    with pytest.raises(TrainingError, match=f"after step 3: .*{unchanged}"):
        train(run, run / "training")
    _with_copying_engine(monkeypatch, 1)
    with pytest.raises(TrainingError, match=f"after step 2: .*{unchanged}"):
        train(run, run / "training")
    _with_copying_engine(monkeypatch, 0)
    assert train(run, run / "training")["resumed_at_step"] == 2


@pytest.mark.parametrize("own_bound", [None, 0.1])
def test_a_bound_of_ones_own_alone_decides_how_far_the_two_may_come_apart(
    values: dict[str, Any], tmp_path: Path, own_bound: float | None
) -> None:
    keys = {"mixed_precision": "bf16", **({"max_sync_drift": own_bound} if own_bound else {})}
    set_up_ = session.load_session(make_run(tmp_path / "run", with_keys(values, **keys)))
    progress, sampler = TrainingState(tokens_per_pass=100), set_up_.sampler
    assert sampler is not None
    score = sampler.engine.compute_logprobs
    sync_weights(set_up_, sampler, progress)
    sampler.engine.compute_logprobs = lambda sequences: [[value + 0.09 for value in row] for row in score(sequences)]  # type: ignore[method-assign]
    if own_bound:
        assert sync_weights(set_up_, sampler, progress) == pytest.approx(0.09, abs=0.01)
    else:
        with pytest.raises(TrainingError, match=r"have come apart \S+ times as far as rounding explains"):
            sync_weights(set_up_, sampler, progress)


@pytest.mark.parametrize(("off", "stops"), [(0.2, False), (0.4, True)])
def test_rounding_with_the_bases_weights_sets_the_bound_and_another_model_stops_before_the_first_update(
    values: dict[str, Any], tmp_path: Path, off: float, stops: bool
) -> None:
    """Twice the usual bound is no reason to stop if it was there before anything was trained."""
    session_ = session.load_session(make_run(tmp_path / "run", with_keys(values, mixed_precision="bf16")))
    sampler = session_.sampler
    assert sampler is not None
    score = sampler.engine.compute_logprobs
    sampler.engine.compute_logprobs = lambda sequences: [[value + off for value in row] for row in score(sequences)]  # type: ignore[method-assign]
    if stops:
        with pytest.raises(TrainingError, match=r"before the first update: .* with the base's weights on both sides"):
            begin_probing(session_, sampler)
    else:
        begin_probing(session_, sampler)
        assert sync_weights(session_, sampler, TrainingState(tokens_per_pass=100)) == pytest.approx(off, abs=0.02)
        assert sampler.probe.bound == pytest.approx(3 * off, abs=0.06)


def test_how_the_weights_reach_the_engine_is_said_once_and_recorded(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _with_copying_engine(monkeypatch, 0)
    run = make_run(tmp_path / "run", with_keys(values, max_steps=3))
    assert train(run, run / "training")["weights_reached_engine"] == "copied"
    assert capsys.readouterr().out.count("training: weights reach the engine: copied (drift ") == 1


def test_without_a_lost_sync_nothing_stops(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_copying_engine(monkeypatch, 0)
    run = make_run(tmp_path / "run", values)
    assert train(run, run / "training")["metrics"]["sampling/sync_drift"] < 1e-5


@pytest.mark.e2e
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("engine", ["vllm", "vllm-lora", "vllm-server", "vllm-server-lora"])
def test_a_weight_that_does_not_reach_vllm_stops_the_training_in_the_update_that_loses_it(
    tmp_path: Path, engine: str, precision: str
) -> None:
    """Whichever it is, at lower learning rates than are used too, and on any processor. vLLM that gets all of them does
    not stop it."""
    rows = forked.call(measure, engine, precision, tmp_path, 3, 2, (1e-7, 1e-5))
    for row in rows:
        assert row.noticed == row.lost, row
        assert row.by == ("checksums" if row.lost else ""), row
    lost = {row.loss for row in rows if row.lost == 1}
    assert {"nothing arrives", "each update arrives one late", "layer 0 stays", "one matrix does not arrive"} <= lost
    if engine.endswith("lora"):
        assert {"one MLP stays", "two matrices are swapped"} <= lost
    elif precision == "no":
        assert lost == LOSSES.keys()


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.e2e)])
def test_prompts_and_completions_of_one_token_are_probed_too(
    values: dict[str, Any], tmp_path: Path, engine: str
) -> None:
    values["rewards"] = [{"function": "tests.grpo_core.training.test_loop:parity"}]
    run = make_run(tmp_path / "run", with_keys(values, engine=engine, max_completion_length=1, max_steps=2))
    pq.write_table(pa.table({"prompt": [str(i % 10) for i in range(24)]}), run / "dataset" / "train.parquet")
    steps = forked.train(run)
    assert [step["sampling/sync_drift"] < 1e-4 for step in steps] == [True] * 2


def first_token(completion_ids: list[list[int]]) -> list[float]:
    return [float(ids[0]) for ids in completion_ids]


@pytest.mark.e2e
def test_vllm_follows_an_adapter_in_a_training_whose_completions_are_one_token_long(
    values: dict[str, Any], tmp_path: Path
) -> None:
    """The probe is then as long as the longest sequence that the engine takes."""
    values["rewards"] = [{"function": "tests.grpo_core.training.test_weight_sync:first_token"}]
    keys = {"engine": "vllm", "max_completion_length": 1, "max_steps": 3, "learning_rate": 1e-3}
    keys |= {"use_peft": True, "use_rslora": True, "lora_alpha": 8, "lora_dropout": 0.1}
    run = make_run(tmp_path / "run", with_keys(values, **keys))
    steps = forked.train(run)
    assert [step["sampling/sync_drift"] < 1e-4 for step in steps] == [True] * 3
    assert all(step["grad_norm"] > 0 for step in steps)
