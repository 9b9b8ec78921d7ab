"""The health policy: each limit is seen when it is broken, said in words, and acted on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from grpo_core.config.files import dump_config, load_config
from grpo_core.config.training import HealthConfig
from grpo_core.errors import NotFiniteError, TrainingError
from grpo_core.model.loading import load_model
from grpo_core.rewards.trl_arguments import TrainerState
from grpo_core.training import loop as trainer
from grpo_core.training.health import is_healthy, not_finite, observe
from grpo_core.training.loop import train
from tests.conftest import make_run, with_keys

HEALTHY = {
    "frac_reward_zero_std": 0.2,
    "entropy": 1.0,
    "kl": 0.01,
    "clip_ratio/region_mean": 0.05,
    "log_ratio/max": 0.2,
    "completions/clipped_ratio": 0.1,
    "sampling/importance_sampling_ratio/mean": 0.99,
    "sampling/effective_sample_share": 0.97,
    "conversations/failed": 0.05,
    "environment/verifier_errors": 0.2,
}
BROKEN = [
    ("zero_advantages", "frac_reward_zero_std", 1.0, "nothing to learn from"),
    ("entropy", "entropy", 1e-5, "stops exploring"),
    ("kl", "kl", 11.0, "far from its reference"),
    ("clip_ratio", "clip_ratio/region_mean", 0.6, "no gradient"),
    ("log_ratio", "log_ratio/max", 7.0, "differ by a factor of e to that power"),
    ("clipped_length", "completions/clipped_ratio", 0.95, "cut off before they end"),
    ("importance_sampling_ratio", "sampling/importance_sampling_ratio/mean", 0.012, "most of the gradient"),
    ("effective_sample_share", "sampling/effective_sample_share", 0.4, "a few tokens make most of the gradient"),
    ("failed_conversations", "conversations/failed", 0.2, "these conversations have no reward"),
    ("verifier_errors", "environment/verifier_errors", 0.6, "the verifier raises or takes too long"),
]


def _after(config: HealthConfig, steps: list[dict[str, float]]) -> list[list[str]]:
    """The rules found broken after each of the steps."""
    streaks: dict[str, int] = {}
    found = []
    for number, metrics in enumerate(steps, 1):
        streaks, findings = observe(config, streaks, number, metrics)
        found.append([finding.rule for finding in findings])
    return found


@pytest.mark.parametrize(("rule", "metric", "value", "words"), BROKEN, ids=[case[0] for case in BROKEN])
def test_a_broken_limit_is_found_once_it_lasts_and_said_in_words(
    rule: str, metric: str, value: float, words: str
) -> None:
    config = HealthConfig(patience=3, zero_advantages_steps=3)
    bad = {**HEALTHY, metric: value}
    assert _after(config, [HEALTHY, bad, bad, bad, bad]) == [[], [], [], [rule], []]
    assert _after(config, [bad, bad, HEALTHY, bad, bad]) == [[]] * 5
    assert _after(config, [bad] * 6) == [[], [], [rule], [], [], [rule]]
    _, findings = observe(config, {rule: 2}, 7, bad)
    assert "step 7" in findings[0].message
    assert words in findings[0].message
    assert rule == "zero_advantages" or f"{value:.4g}" in findings[0].message


def test_silent_groups_are_no_problem_while_a_teacher_has_something_to_show() -> None:
    config = HealthConfig(zero_advantages_steps=1)
    silent = {**HEALTHY, "frac_reward_zero_std": 1.0}
    told = [silent | {"teacher_kl": 0.3}, silent | {"teacher_kl": 0.3, "teacher_shown": 0.1}]
    told += [silent | {"teacher_shown": 0.1}]  # in another update of the batch
    nothing = silent | {"teacher_shown": 0.0}
    assert _after(config, [*told, nothing, silent]) == [[], [], [], ["zero_advantages"], ["zero_advantages"]]


def test_healthy_figures_and_missing_ones_break_nothing() -> None:
    config = HealthConfig(patience=1, zero_advantages_steps=1)
    assert _after(config, [HEALTHY, {}]) == [[], []]
    at_the_limit = {**HEALTHY, "kl": 10.0, "entropy": 1e-3, "completions/clipped_ratio": 0.9, "log_ratio/max": 5.0}
    at_the_limit |= {"conversations/failed": 0.1, "environment/verifier_errors": 0.5}
    assert _after(config, [at_the_limit]) == [[]]


def test_only_limits_that_would_roll_back_make_a_checkpoint_unhealthy() -> None:
    streaks = {"entropy": 1}
    assert is_healthy(HealthConfig(), streaks)
    assert not is_healthy(HealthConfig(entropy_action="roll_back"), streaks)
    assert is_healthy(HealthConfig(entropy_action="roll_back"), {"kl": 2})


def test_a_number_that_is_none_is_acted_on_at_once_and_explained() -> None:
    finding = not_finite(HealthConfig(not_finite_action="roll_back"), 3, NotFiniteError("step 3: loss nan"))
    assert finding.action == "roll_back"
    assert "loss nan" in finding.message
    assert "learning_rate" in finding.message


def _train(run: Path) -> dict[str, Any]:
    return train(run, run / "training")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def constant(completions: list[str]) -> list[float | None]:
    return [1.0] * len(completions)


def test_rewards_that_tell_nothing_apart_are_warned_of_in_the_log(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values["rewards"] = [{"function": "tests.grpo_core.training.test_health:constant"}]
    run = make_run(tmp_path / "run", with_keys(values, zero_advantages_steps=2))
    assert _train(run)["counted"]["updates"] == 4
    assert "health: step 2: no completion has an advantage, 2 updates in a row" in capsys.readouterr().out
    found = _lines(run / "training" / "health.jsonl")
    assert [(f["step"], f["rule"], f["action"]) for f in found] == [
        (2, "zero_advantages", "warn"),
        (4, "zero_advantages", "warn"),
    ]


def silent(completions: list[str]) -> list[float | None]:
    return [None] * len(completions)


def at_first_silent(completions: list[str], trainer_state: TrainerState) -> list[float | None]:
    return [len(each) if trainer_state.global_step else None for each in completions]


def test_a_batch_to_which_no_reward_applies_changes_nothing_and_the_training_goes_on(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values["rewards"] = [{"function": "tests.grpo_core.training.test_health:at_first_silent"}]
    run = make_run(tmp_path / "run", values)
    assert _train(run)["counted"]["updates"] == 4
    first, *rest = _lines(run / "training" / "metrics.jsonl")
    assert first["frac_unscored"] == 1 and first["loss"] == first["grad_norm"] == 0
    assert not {"reward", "reward_std"} & first.keys()
    assert all(step["frac_unscored"] == 0 and step["reward"] > 0 for step in rest)
    assert "step 1/4  no reward applies  loss +0.0000" in capsys.readouterr().out


def test_rewards_that_never_apply_stop_the_training_with_the_reason(values: dict[str, Any], tmp_path: Path) -> None:
    values["rewards"] = [{"function": "tests.grpo_core.training.test_health:silent"}]
    run = make_run(tmp_path / "run", with_keys(values, zero_advantages_steps=3))
    with pytest.raises(TrainingError, match=r"step 3: no reward applied to any completion, 3 updates in a row"):
        _train(run)


@pytest.mark.usefixtures("endless")
def test_completions_that_never_end_stop_the_training_when_asked_to(values: dict[str, Any], tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", with_keys(values, patience=2, clipped_length_action="stop"))
    with pytest.raises(TrainingError, match=r"step 2: completions/clipped_ratio = 1 is above 0\.9, 2 updates in a row"):
        _train(run)
    steps = _lines(run / "training" / "metrics.jsonl")
    assert [(step["step"], step["completions/clipped_ratio"]) for step in steps] == [(1, 1.0), (2, 1.0)]


@pytest.mark.slow
def test_an_update_that_is_not_finite_stops_the_training_with_its_figures_in_the_log_until_it_is_made_again(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_once(monkeypatch, {3})
    run = make_run(tmp_path / "run", with_keys(values, save_steps=2))
    with pytest.raises(TrainingError, match="step 3: loss nan, gradient norm nan"):
        _train(run)
    *healthy, stopped = _lines(run / "training" / "metrics.jsonl")
    assert stopped["step"] == 3
    assert math.isnan(stopped["loss"]) and math.isnan(stopped["grad_norm"])
    assert {*healthy[0]} - {*stopped} == {"learning_rate"}, "no step was taken"
    _train(run)
    steps = _lines(run / "training" / "metrics.jsonl")
    assert [(step["step"], math.isfinite(step["loss"])) for step in steps] == [(n, True) for n in (1, 2, 3, 4)]


def _break_once(monkeypatch: pytest.MonkeyPatch, at_updates: set[int]) -> None:
    """The loss is NaN in these updates, counted over the whole process."""
    original, updates = trainer.update, 0

    def broken(session: Any, batch: Any, progress: Any) -> dict[str, float]:
        nonlocal updates
        updates += 1
        if updates in at_updates:
            batch.weights.fill_(math.nan)
        return original(session, batch, progress)

    monkeypatch.setattr(trainer, "update", broken)


@pytest.mark.slow
def test_after_a_nan_training_goes_back_to_the_last_checkpoint_and_on_with_half_the_learning_rate(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_once(monkeypatch, {6})
    keys = {"not_finite_action": "roll_back", "max_steps": 6, "save_steps": 2, "lr_scheduler_type": "constant"}
    run = make_run(tmp_path / "run", with_keys(values, **keys))
    result = _train(run)
    steps = _lines(run / "training" / "metrics.jsonl")
    assert result["roll_backs"] == 1
    assert result["counted"] == result["planned"]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [step["learning_rate"] for step in steps] == [0.01] * 4 + [0.005] * 2
    (finding,) = _lines(run / "training" / "health.jsonl")
    assert (finding["step"], finding["rule"], finding["action"]) == (6, "not_finite", "roll_back")


def _break_the_weights_after(monkeypatch: pytest.MonkeyPatch, updates: int) -> None:
    """This update, once, leaves finite weights that no forward pass survives."""
    original, done = trainer.update, False

    def breaking(session: Any, micro_batches: Any, progress: Any) -> dict[str, float]:
        nonlocal done
        metrics = original(session, micro_batches, progress)
        if progress.updates + 1 == updates and not done:
            done = True
            for parameter in session.model.parameters():
                parameter.data.mul_(1e30)
        return metrics

    monkeypatch.setattr(trainer, "update", breaking)


CONSTANT = {"max_steps": 6, "save_steps": 2, "save_total_limit": 1, "lr_scheduler_type": "constant"}


def test_a_checkpoint_of_weights_that_the_next_step_finds_broken_is_not_gone_back_to(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_the_weights_after(monkeypatch, 4)
    run = make_run(tmp_path / "run", with_keys(values, not_finite_action="roll_back", **CONSTANT))
    result = _train(run)
    assert result["roll_backs"] == 1
    assert result["counted"] == result["planned"]
    assert [finding["step"] for finding in _lines(run / "training" / "health.jsonl")] == [5]
    rates = [step["learning_rate"] for step in _lines(run / "training" / "metrics.jsonl")]
    assert rates == [0.01] * 2 + [0.005] * 4, "checkpoint 4 holds the broken weights, checkpoint 2 does not"


@pytest.mark.slow
def test_a_roll_back_brings_back_the_average_that_teaches_too(
    values: dict[str, Any], model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fourth update's broken weights are in the average, and in a checkpoint: steps 3 to 6 are made again."""
    _break_the_weights_after(monkeypatch, 4)
    move, policies = trainer.move_average, list[dict[str, torch.Tensor]]()
    sessions: list[Any] = []

    def noted(session: Any) -> None:
        move(session)
        sessions[:] = [session]
        policies.append({name: weights.detach().double() for name, weights in session.model.named_parameters()})

    monkeypatch.setattr(trainer, "move_average", noted)
    values["teacher"] = {"template": "{answer}={prompt}", "update_rate": 0.3, "weight": 0.5}
    run = make_run(tmp_path / "run", with_keys(values, not_finite_action="roll_back", **CONSTANT))
    assert _train(run)["roll_backs"] == 1
    made = [policies[step] for step in (0, 1, *range(4, 8))]
    assert len(policies) == 8
    for name, weights in load_model(model_folder).named_parameters():
        expected = weights.double()
        for policy in made:
            expected = 0.7 * expected + 0.3 * policy[name]
        torch.testing.assert_close(sessions[0].average[name].double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_what_broken_weights_stopped_goes_on_from_before_them_once_it_may_roll_back(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_the_weights_after(monkeypatch, 4)
    run = make_run(tmp_path / "run", with_keys(values, **CONSTANT))
    for _ in range(2):
        with pytest.raises(
            TrainingError, match=r"after step 4: .* not finite.*health\.not_finite_action = 'roll_back'"
        ):
            _train(run)
    (run / "config.toml").write_text(
        dump_config(load_config(run / "config.toml", ["health.not_finite_action=roll_back"]))
    )
    result = _train(run)
    assert (result["resumed_at_step"], result["roll_backs"]) == (4, 1)
    rates = [step["learning_rate"] for step in _lines(run / "training" / "metrics.jsonl")]
    assert rates == [0.01] * 2 + [0.005] * 4


@pytest.mark.slow
def test_a_roll_back_that_finds_no_whole_healthy_checkpoint_leaves_the_others(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", with_keys(values, not_finite_action="roll_back", **CONSTANT))
    _train(run)
    (run / "training" / "result.json").unlink()
    checkpoints = run / "training" / "checkpoints"
    assert sorted(folder.name for folder in checkpoints.iterdir()) == ["step-000002", "step-000004"]
    (checkpoints / "step-000004" / "healthy").unlink()
    (checkpoints / "step-000002" / "state.pt").write_bytes(b"cut off")
    _break_once(monkeypatch, {1})
    with pytest.warns(UserWarning, match="step-000002 is damaged"), pytest.raises(TrainingError, match="no healthy"):
        _train(run)
    assert sorted(folder.name for folder in checkpoints.iterdir()) == ["step-000002.damaged", "step-000004"]
    assert _train(run)["resumed_at_step"] == 4


def test_a_lowered_limit_of_roll_backs_counts_those_already_made(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _break_once(monkeypatch, {3, 4, 5})  # the third, and the third again after each roll-back
    run = make_run(tmp_path / "run", with_keys(values, not_finite_action="roll_back", max_roll_backs=2, **CONSTANT))
    with pytest.raises(TrainingError, match="unhealthy again after 2 roll-backs"):
        _train(run)
    (run / "config.toml").write_text(dump_config(load_config(run / "config.toml", ["health.max_roll_backs=1"])))
    _break_once(monkeypatch, {1})
    with pytest.raises(TrainingError, match="unhealthy again after 2 roll-backs"):
        _train(run)


def test_weights_that_are_not_finite_are_never_saved(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = torch.optim.AdamW.step

    def overflowing(self: Any, *arguments: Any) -> None:
        step(self, *arguments)
        if self.param_groups[0]["lr"]:  # not in set-up, where a step takes the memory of the optimizer's state
            self.param_groups[0]["params"][-1].data[0] = math.inf

    monkeypatch.setattr(torch.optim.AdamW, "step", overflowing)
    run = make_run(tmp_path / "run", with_keys(values, save_steps=1, max_steps=1))
    with pytest.raises(TrainingError, match="step 1: the weights after the update are not finite"):
        _train(run)
    assert not [path for path in (run / "training").rglob("*") if path.suffix in (".pt", ".safetensors")]


def test_a_roll_back_reaches_the_checkpoint_from_before_the_limit_was_first_broken(
    values: dict[str, Any], tmp_path: Path
) -> None:
    keys = {"entropy_action": "roll_back", "min_entropy": 50.0, "patience": 3, "max_roll_backs": 1}
    run = make_run(tmp_path / "run", with_keys(values, **keys, max_steps=6, save_steps=1, save_total_limit=1))
    with pytest.raises(TrainingError, match="unhealthy again after 1 roll-backs"):
        _train(run)
    assert [finding["step"] for finding in _lines(run / "training" / "health.jsonl")] == [3, 3]
    names = sorted(folder.name for folder in (run / "training" / "checkpoints").iterdir())
    assert names == ["step-000000", "step-000002"], "the only healthy one is from before the first update"


def test_samples_after_a_roll_back_are_others(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"not_finite_action": "roll_back", "max_steps": 2, "save_steps": 1}
    plain, broken = (make_run(tmp_path / name, with_keys(values, **keys)) for name in ("plain", "broken"))
    _train(plain)
    _break_once(monkeypatch, {1})
    _train(broken)
    first = [_completions(run, 0) for run in (plain, broken)]
    assert first[0]["prompt"] == first[1]["prompt"]
    assert first[0]["completion"] != first[1]["completion"]


def _completions(run: Path, index: int) -> dict[str, list[Any]]:
    return pq.read_table(run / f"training/completions/rollout-{index:06d}.parquet").to_pydict()


def test_a_roll_back_between_the_updates_of_a_generation_batch_samples_it_again_for_those_left(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four updates per batch, the fourth is broken: the third and fourth are made again, on other completions."""
    values["rewards"] = [{"function": "tests.grpo_core.training.test_health:constant"}]
    _break_once(monkeypatch, {4})
    keys = {"not_finite_action": "roll_back", "max_steps": 8, "save_steps": 2, "zero_advantages_steps": 3}
    batches = {"steps_per_generation": 4, "gradient_accumulation_steps": 1}
    run = make_run(tmp_path / "run", with_keys(values, **keys, **batches))
    result = _train(run)
    assert result["roll_backs"] == 1
    assert result["counted"] == result["planned"]
    assert result["counted"]["rollouts"] == 2
    drawn = _completions(run, 0)
    half = len(drawn["step"]) // 2
    assert drawn["step"] == [1] * half + [3] * half
    assert drawn["prompt"][:half] == drawn["prompt"][half:]
    assert drawn["completion"][:half] != drawn["completion"][half:]
    assert set(_completions(run, 1)["step"]) == {5}
    found = [(f["step"], f["rule"]) for f in _lines(run / "training" / "health.jsonl")]
    expected = [(3, "zero_advantages"), (4, "not_finite"), (5, "zero_advantages"), (8, "zero_advantages")]
    assert found == expected, "updates in a row are counted from the roll-back on"
