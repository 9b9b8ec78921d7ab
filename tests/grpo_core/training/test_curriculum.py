"""Trainings with a curriculum: what they take, in turn and sampling ahead, killed and continued."""

from __future__ import annotations

import copy
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from torch import nn

from benchmarks.staleness_learning import VirtualServers
from grpo_core.config.files import load_config
from grpo_core.data.curriculum import PassRates, arrange, known_batches, no_rates, read_rates, with_samples, write_rates
from grpo_core.data.order import Schedule, epoch_rows
from grpo_core.errors import ConfigError
from grpo_core.planning.plan import load_plan
from grpo_core.planning.sampling_ahead import batches_ahead
from grpo_core.run_files import PROBED
from grpo_core.training import loop as trainer
from grpo_core.training import session
from grpo_core.training.loop import train
from tests.conftest import make_run, with_keys
from tests.grpo_core.training.training import assert_same, metrics_of, result_of

pytestmark = pytest.mark.slow

PROMPTS = 13  # three batches of four and one dropped per epoch
BAND = {"kind": "band", "band": [0.3, 0.8]}
KINDS = [{"kind": "easy_to_hard"}, BAND, {"kind": "variance", "probe": 2}]
RATES = Path("training") / "pass_rates.parquet"
AHEAD = {"engine": "vllm-server", "max_staleness": 4}


@pytest.fixture(autouse=True)
def _virtual_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    make_engine = session.make_engine

    def engine(config: Any, name: str, model: nn.Module, tokenizer: Any, max_length: int) -> Any:
        if config.rollout.engine != "vllm-server":
            return make_engine(config, name, model, tokenizer, max_length)
        return VirtualServers(model, tokenizer, max_length, update_time=2.0)

    monkeypatch.setattr(session, "make_engine", engine)


def _run(folder: Path, values: dict[str, Any], curriculum: dict[str, Any], **keys: Any) -> Path:
    """A run directory whose prompts pass by the length of what is said about them: in between, and differently."""
    values = copy.deepcopy(values)
    values["data"]["curriculum"] = curriculum
    values["evaluation"] = {"accuracy_reward": "length"}
    keys = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 16, "max_steps": 9, **keys}
    run = make_run(folder, with_keys(values, **keys), PROMPTS)
    if curriculum.get("probe"):
        (run / PROBED).parent.mkdir()
        passed = np.linspace(0, 2, PROMPTS)
        write_rates(PassRates(passed, np.full(PROMPTS, 2), np.zeros(PROMPTS, int)), run / PROBED)
    return run


def _records(run: Path) -> list[dict[str, list[Any]]]:
    """The completions of each generation batch."""
    files = sorted((run / "training" / "completions").iterdir())
    return [pq.read_table(file).to_pydict() for file in files]


def _expect_prompts_by_the_rule(run: Path) -> None:
    """The prompts whose turn it was follow from the records of a fixed moment, sampled ahead or not; and so do the
    rates that the training has kept."""
    config, plan, records = load_config(run / "config.toml"), load_plan(run / "plan.json"), _records(run)
    keys, ahead = config.data.curriculum, batches_ahead(config.rollout.max_staleness)
    known = [read_rates(run / PROBED, PROMPTS) if keys.probe else no_rates(PROMPTS)]
    for step, table in enumerate(records):
        known.append(with_samples(known[-1], np.array(table["row"]), np.array(table["rewards/length"]), step + 1))
    expected, trained = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for index, table in enumerate(records):
        epoch = index // plan.rollouts_per_epoch
        rates = known[known_batches(plan, epoch, ahead)]
        arranged = arrange(epoch_rows(plan, 0, epoch), rates, keys, plan, 0, epoch)
        expected.update({(index, row): 4 for row in Schedule(plan, 0, {epoch: arranged}).prompts(index)})
        turns = table.get("scheduled_batch", [index] * len(table["row"]))
        trained.update(zip(turns, table["row"], strict=True))
    assert trained == expected
    assert result_of(run)["counted"] == result_of(run)["planned"]
    kept = read_rates(run / RATES, PROMPTS)
    assert kept.completions.tolist() == known[-1].completions.tolist()
    assert kept.passed.tolist() == pytest.approx(known[-1].passed.tolist())
    assert kept.last_step.tolist() == known[-1].last_step.tolist()


def _killed_after(step: int, whole: Path, run: Path) -> Path:
    """A copy of a finished training, as a kill leaves it while the checkpoint of `step` is the newest."""
    shutil.copytree(whole, run)
    (run / "training" / "result.json").unlink()
    for later in range(step + 1, load_plan(run / "plan.json").max_steps):
        shutil.rmtree(run / "training" / "checkpoints" / f"step-{later:06d}")
    return run


@pytest.mark.parametrize("curriculum", KINDS, ids=lambda keys: keys["kind"])
def test_each_batch_has_the_prompts_that_follow_from_the_rates_of_a_fixed_moment(
    values: dict[str, Any], tmp_path: Path, curriculum: dict[str, Any]
) -> None:
    run = _run(tmp_path / "run", values, curriculum)
    train(run, run / "training")
    _expect_prompts_by_the_rule(run)


@pytest.mark.parametrize(
    "curriculum",
    [pytest.param(it, id=it["kind"], marks=[pytest.mark.e2e] * (it["kind"] == "variance")) for it in KINDS[1:]],
)
def test_so_it_has_while_sampling_ahead_also_after_a_kill(
    values: dict[str, Any], tmp_path: Path, curriculum: dict[str, Any]
) -> None:
    whole = _run(tmp_path / "whole", values, curriculum, **AHEAD, save_steps=1, save_total_limit=100)
    train(whole, whole / "training")
    _expect_prompts_by_the_rule(whole)
    assert any({*table["scheduled_batch"]} != {index} for index, table in enumerate(_records(whole)))
    for step in (2, 5):
        run = _killed_after(step, whole, tmp_path / f"killed-{step}")
        train(run, run / "training")
        _expect_prompts_by_the_rule(run)


@pytest.mark.parametrize(
    ("curriculum", "keys"),
    [
        pytest.param(KINDS[2], {"dynamic_sample": True}, id="variance, groups replaced"),
        pytest.param(
            *(KINDS[0], {"num_iterations": 2, "max_steps": 10}),
            id="easy to hard, within batches",
            marks=pytest.mark.e2e,
        ),
    ],
)
def test_a_training_killed_after_any_update_goes_on_bit_for_bit(
    values: dict[str, Any], tmp_path: Path, curriculum: dict[str, Any], keys: dict[str, Any]
) -> None:
    whole = _run(tmp_path / "whole", values, curriculum, **keys, save_steps=1, save_total_limit=100)
    train(whole, whole / "training")
    for step in range(1, load_plan(whole / "plan.json").max_steps, 4):
        run = _killed_after(step, whole, tmp_path / f"killed-{step}")
        train(run, run / "training")
        assert_same(run, whole)
        assert (run / RATES).read_bytes() == (whole / RATES).read_bytes()


def test_after_a_roll_back_the_epochs_that_had_begun_stay_as_they_were(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that is not finite after the fifth batch, in the second epoch: back to between its two updates."""
    update, states = trainer.update, list[Any]()

    def breaking(session: Any, batch: Any, state: Any) -> dict[str, float]:
        states.append(state)
        if len(states) == 11:
            batch.weights.fill_(math.nan)
        return update(session, batch, state)

    monkeypatch.setattr(trainer, "update", breaking)
    keys = {"steps_per_generation": 2, "per_device_train_batch_size": 8, "max_steps": 18, "save_steps": 1}
    run = _run(tmp_path / "run", values, {"kind": "variance"}, **keys, not_finite_action="roll_back")
    train(run, run / "training")
    assert (result_of(run)["roll_backs"], result_of(run)["counted"]) == (1, result_of(run)["planned"])
    before, after = states[10], next(state for state in states if state.roll_backs)
    assert (before.updates, after.updates) == (10, 9)
    assert (after.arranged[1] == before.arranged[1]).all()
    assert after.rates.completions.sum() == 16 * 5, "the batch counts once, though it is sampled again"


def test_what_a_curriculum_takes_is_said_and_recorded(
    values: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = _run(tmp_path / "run", values, {**BAND, "probe": 2})
    train(run, run / "training")
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("training: epoch 1 takes")]
    below, above = (np.linspace(0, 1, PROMPTS) < 0.3).sum(), (np.linspace(0, 1, PROMPTS) > 0.8).sum()
    taken = PROMPTS - below - above
    assert said == [
        f"training: epoch 1 takes {taken} of 13 prompts, mean pass rate 54%; {below} have a pass rate below 0.3, "
        f"{above} above 0.8"
    ]
    first = metrics_of(run)[0]
    assert first["curriculum/taken"] == pytest.approx(taken / PROMPTS)
    assert first["curriculum/in_band"] == pytest.approx(taken / PROMPTS)
    assert first["curriculum/known"] == 1.0
    assert first["curriculum/pass_rate"] == pytest.approx(0.5)


def test_without_a_curriculum_the_rates_are_kept_and_change_nothing(values: dict[str, Any], tmp_path: Path) -> None:
    run = _run(tmp_path / "run", values, {})
    train(run, run / "training")
    plan = load_plan(run / "plan.json")
    rows = [table["row"][::4] for table in _records(run)]
    assert rows == [Schedule(plan, 0).prompts(index) for index in range(plan.rollouts)]
    assert read_rates(run / RATES, PROMPTS).completions.sum() == plan.completions
    assert not any(name.startswith("curriculum/") for name in metrics_of(run)[0])


def test_a_curriculum_without_a_range_of_its_reward_is_refused_with_the_keys(
    values: dict[str, Any], tmp_path: Path
) -> None:
    values["rewards"].append({"function": "char_length", "args": {"target": 3}})
    run = _run(tmp_path / "run", values, {"kind": "variance"})
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace('accuracy_reward = "length"', 'accuracy_reward = "char_length"'))
    with pytest.raises(ConfigError, match=r"data.curriculum.kind='variance' .* 'char_length' .* evaluation.accuracy_"):
        train(run, run / "training")


def test_a_curriculum_on_a_recording_is_refused(values: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.curriculum.kind='variance'.*engine='recorded'"):
        _run(tmp_path / "run", values, {"kind": "variance"}, engine="recorded", recording="runs/other")
