"""Trainings that sample ahead, from servers on a virtual clock: what health limits, stops and roll-backs do to them."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from torch import nn

from benchmarks.staleness_learning import VirtualServers
from grpo_core.config.files import load_config
from grpo_core.data.order import Schedule
from grpo_core.planning.plan import load_plan
from grpo_core.training import loop as trainer
from grpo_core.training import session
from grpo_core.training.interrupt import Stopped
from grpo_core.training.loop import train
from tests.conftest import make_run, with_keys
from tests.grpo_core.training.training import checkpoint_of, metrics_of, result_of, trained_run

pytestmark = pytest.mark.slow

AHEAD = {
    "engine": "vllm-server",
    "max_staleness": 4,
    "max_steps": 12,
    "save_steps": 1,
    "gradient_accumulation_steps": 1,
}
# Broken by any token that is sampled by other weights, and not by rounding.
LOWERING = {"min_effective_sample_share": 0.99999, "effective_sample_share_action": "lower_staleness", "patience": 2}


@pytest.fixture(autouse=True)
def _virtual_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(config: Any, name: str, model: nn.Module, tokenizer: Any, max_length: int) -> VirtualServers:
        return VirtualServers(model, tokenizer, max_length, update_time=2.0)

    monkeypatch.setattr(session, "make_engine", engine)


def _in_force(run: Path) -> list[float]:
    return [row["sampling/max_staleness"] for row in metrics_of(run)]


def _findings(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "training" / "health.jsonl").read_text().splitlines()]


def test_stale_samples_make_the_training_sample_less_far_ahead_until_it_samples_in_turn(
    values: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = trained_run(tmp_path / "run", values, **AHEAD, **LOWERING)
    rows, found = metrics_of(run), _findings(run)
    assert result_of(run)["counted"] == result_of(run)["planned"]
    assert [each["action"] for each in found] == ["lower_staleness"] * 3
    changes = [each["step"] for each in found]
    assert _in_force(run) == [4 >> sum(step < row["step"] for step in changes) for row in rows]
    assert result_of(run)["max_staleness"] == 0
    assert [each["message"].rpartition("; ")[2] for each in found] == [
        f"rollout.max_staleness goes from {before} to {after}" for before, after in ((4, 2), (2, 1), (1, 0))
    ]
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("health: ")]
    assert [line.endswith("[lower staleness]") for line in lines] == [True] * 3
    assert rows[-1]["sampling/staleness/max"] == 0
    assert rows[-1]["sampling/effective_sample_share"] == pytest.approx(1.0, abs=1e-6)
    shares = [row["sampling/effective_sample_share"] for row in rows]
    assert min(shares) < 0.999


def test_a_training_that_goes_on_samples_as_far_ahead_as_it_was_told_to_last(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, advance = make_run(tmp_path / "run", with_keys(values, **AHEAD, **LOWERING)), trainer.advance

    def stopping(session: Any, state: Any, log: Any) -> Any:
        if state.max_staleness < 4 and log.resumed_at == 0:
            raise Stopped
        return advance(session, state, log)

    monkeypatch.setattr(trainer, "advance", stopping)
    with pytest.raises(Stopped):
        train(run, run / "training")
    (finding,) = _findings(run)
    assert checkpoint_of(run, finding["step"])["state"]["max_staleness"] == 2
    train(run, run / "training")
    assert result_of(run)["resumed_at_step"] == finding["step"]
    assert result_of(run)["counted"] == result_of(run)["planned"]
    assert _in_force(run)[: finding["step"] + 1] == [4.0] * finding["step"] + [2.0]


@pytest.mark.parametrize("updates", [1, 4], ids=["between batches", "within a batch"])
def test_after_a_roll_back_each_prompt_is_trained_as_planned_on_other_samples_none_too_old(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updates: int
) -> None:
    """`updates`: per generation batch. The last but one of the fourth batch is broken."""
    batches = {"steps_per_generation": updates, "per_device_train_batch_size": 16 // updates}
    steps = {"max_steps": 6 * updates, "save_steps": 1, "learning_rate": 1e-3}
    broken, update, done = 4 * updates - (updates > 1), trainer.update, []

    def breaking(session: Any, batch: Any, state: Any) -> dict[str, float]:
        if state.updates + 1 == broken and not done:
            done.append(state.taken)
            batch.weights.fill_(math.nan)
        return update(session, batch, state)

    monkeypatch.setattr(trainer, "update", breaking)
    run = trained_run(tmp_path / "run", values, **{**AHEAD, **batches, **steps}, not_finite_action="roll_back")
    result, config, plan = result_of(run), load_config(run / "config.toml"), load_plan(run / "plan.json")
    assert result["roll_backs"] == 1
    assert result["counted"] == result["planned"]
    trained: Counter[tuple[int, str]] = Counter()
    for path in sorted((run / "training" / "completions").iterdir()):
        table = pq.read_table(path).to_pydict()
        newest = [step == max(table["step"]) for step in table["step"]]
        groups = [*zip(table["scheduled_batch"], table["prompt"], strict=True)]
        last = [group for group, is_newest in zip(groups, newest, strict=True) if is_newest]
        if len(last) < len(groups):  # sampled again for the updates that were left: the same prompts
            assert updates > 1
            earlier = [group for group, is_newest in zip(groups, newest, strict=True) if not is_newest]
            assert Counter(earlier) == Counter(last)
            half = len(groups) // 2
            assert table["completion"][:half] != table["completion"][half:]
        trained += Counter(last)
        assert max(age for ages in table["ages"] if ages for age in ages) <= 4
    prompts = pq.read_table(run / "dataset" / "train.parquet")["prompt"].to_pylist()
    assert trained == {
        (index, prompts[row]): plan.num_generations
        for index in range(plan.rollouts)
        for row in Schedule(plan, config.seed).prompts(index)
    }
    (turns,) = done
    assert {turn for turn, _ in turns} != {3}, "the batch has groups whose turn is another batch's"
