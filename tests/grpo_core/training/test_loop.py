"""The loop: killed and resumed, cut into other micro-batches or processes, it ends with the same weights."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_core.errors import RewardError, TrainingError
from grpo_core.planning.plan import load_plan
from grpo_core.training.loop import train
from tests.conftest import config_values, make_run, with_keys
from tests.grpo_core.rollout.vllm_engine import plain_logprobs
from tests.grpo_core.training.several import in_processes
from tests.grpo_core.training.training import are_close, metrics_of, trained_run, weights_of

# Some gradients are zero except for rounding (a key bias, under softmax); Adam with its usual epsilon would make a full
# step of that noise.
CALM_ADAM = {"adam_epsilon": 1e-3}
EVERYTHING = {
    "dynamic_sample": True,
    "max_resample_times": 1,
    "top_entropy_quantile": 0.6,
    "entropy_coef": 0.05,
    "eval_steps": 3,
    "off_policy_mask_threshold": 0.1,
}
WINDOWS = {"num_iterations": 2, "steps_per_generation": 4, "beta": 0.1, "max_steps": 7}


@pytest.fixture(scope="module", params=[{}, WINDOWS], ids=["on-policy", "inside a generation window, with KL"])
def run(request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run = trained_run(folder / "run", config_values(model_folder, folder), **request.param)
    AcceleratorState._reset_state(reset_partial_state=True)
    return run


def test_what_the_plan_says_is_what_happens(run: Path) -> None:
    plan = load_plan(run / "plan.json")
    result = json.loads((run / "training" / "result.json").read_text())
    assert result["counted"] == result["planned"] == plan.counts(plan.max_steps)
    assert [step["step"] for step in metrics_of(run)] == list(range(1, plan.max_steps + 1))
    assert len(list((run / "training" / "completions").iterdir())) == plan.rollouts


@pytest.mark.slow
def test_the_engines_log_probabilities_are_the_trainers(run: Path) -> None:
    for step in metrics_of(run):
        assert step["sampling/sampling_logp_difference/max"] <= 1e-4


def test_training_raises_the_reward(values: dict[str, Any], tmp_path: Path) -> None:
    values["rewards"] = [{"function": "length", "args": {"target": 3}}]
    metrics = metrics_of(trained_run(tmp_path / "run", values, max_steps=16))
    first, last = ([m["reward"] for m in part] for part in (metrics[:5], metrics[-5:]))
    assert sum(last) / 5 > sum(first) / 5 + 0.2


def test_a_penalised_sample_is_weighted_by_the_ratio_of_the_two_policies(
    values: dict[str, Any], tmp_path: Path
) -> None:
    """On-policy too, where the weights are 1 without a penalty."""
    run = trained_run(tmp_path / "run", values, repetition_penalty=1.3)
    for step in metrics_of(run):
        low, high = (step[f"sampling/importance_sampling_ratio/{which}"] for which in ("min", "max"))
        assert low < 0.9 < 1.1 < high
    model = AutoModelForCausalLM.from_pretrained(values["model"]["name_or_path"]).eval()
    for row in pq.read_table(run / "training" / "completions" / "rollout-000000.parquet").to_pylist():
        ids = row["prompt_ids"] + row["completion_ids"]
        expected = plain_logprobs(model, ids, penalty=1.3)[len(row["prompt_ids"]) - 1 :]
        assert row["sampling_logprobs"] == pytest.approx(expected, abs=1e-4)


def test_a_text_to_stop_at_is_trained_and_not_shown_to_rewards(values: dict[str, Any], tmp_path: Path) -> None:
    run = trained_run(tmp_path / "run", values, stop=["7", "12"], min_p=0.01)
    tokenizer = AutoTokenizer.from_pretrained(values["model"]["name_or_path"])
    rows = pq.read_table(run / "training" / "completions").to_pylist()
    stopped = 0
    for row in rows:
        whole = tokenizer.decode(row["completion_ids"], skip_special_tokens=True)
        ending = next((text for text in ("7", "12") if whole.endswith(text)), "")
        assert row["completion"] == whole.removesuffix(ending)
        assert not {"7", "12"} & {row["completion"][at : at + n] for at in range(6) for n in (1, 2)}
        assert row["truncated"] == (not ending and row["completion_ids"][-1] != tokenizer.eos_token_id)
        assert len(row["sampling_logprobs"]) == len(row["completion_ids"])
        stopped += bool(ending)
    assert 0 < stopped < len(rows)


def test_in_bf16_sampler_and_trainer_still_agree(values: dict[str, Any], tmp_path: Path) -> None:
    for step in metrics_of(trained_run(tmp_path / "run", values, mixed_precision="bf16")):
        assert step["sampling/sampling_logp_difference/mean"] < 0.02


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("masked", [True, False])
def test_truncated_completions_move_the_model_unless_they_are_masked(
    values: dict[str, Any], tmp_path: Path, model_folder: Path, masked: bool
) -> None:
    values["rewards"] = [{"function": "tests.grpo_core.training.test_loop:parity"}]
    run = trained_run(tmp_path / "run", values, mask_truncated_completions=masked)
    metrics = metrics_of(run)
    assert {step["completions/clipped_ratio"] for step in metrics} == {1}
    assert metrics[0]["frac_reward_zero_std"] < 1
    before, after = load_file(model_folder / "model.safetensors"), weights_of(run)
    assert masked == all(torch.equal(before[name], after[name]) for name in before)


def parity(completion_ids: list[list[int]]) -> list[float | None]:
    return [float(ids[0] % 2) for ids in completion_ids]


@pytest.mark.slow
def test_two_processes_have_the_figures_of_one(values: dict[str, Any], tmp_path: Path) -> None:
    """With replaced groups, an entropy mask and bonus, and evaluations."""
    values["rewards"] = [{"function": "tests.grpo_core.training.test_loop:brevity"}]
    values = with_keys(values, **CALM_ADAM, **EVERYTHING, gradient_accumulation_steps=1)
    one = trained_run(tmp_path / "one", values, per_device_train_batch_size=16)
    two = make_run(tmp_path / "two", with_keys(values, num_processes=2))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    in_processes(2, tmp_path / "both", lambda _: train(two, two / "training"), port)
    assert are_close(one, two)
    for name in ("reward", "logged/brevity/length", "eval_reward", "eval_logged/brevity/length"):
        figures = [[step[name] for step in metrics_of(run) if name in step] for run in (one, two)]
        assert figures[0]
        assert figures[0] == pytest.approx(figures[1], abs=1e-6)
    assert [s["loss"] for s in metrics_of(one)] == pytest.approx([s["loss"] for s in metrics_of(two)], abs=1e-4)


def brevity(completion_ids: list[list[int]], log_metric: Callable[[str, float], None]) -> list[float]:
    log_metric("length", sum(map(len, completion_ids)) / len(completion_ids))
    return [-float(len(ids)) for ids in completion_ids]


def test_another_number_of_processes_than_planned_is_refused(values: dict[str, Any], tmp_path: Path) -> None:
    values["train"]["num_processes"] = 2
    with pytest.raises(TrainingError, match="num_processes=2, but 1 were started"):
        train(make_run(tmp_path / "run", values), tmp_path / "run" / "training")


def test_a_loss_that_is_not_finite_stops_before_the_step_is_taken(values: dict[str, Any], tmp_path: Path) -> None:
    values["rewards"] = [{"function": "tests.grpo_core.training.test_loop:huge", "weight": 1e290}]
    with pytest.raises(TrainingError, match=r"step 1: loss .* an update was too large"):
        trained_run(tmp_path / "run", values, scale_rewards="none", save_steps=1)
    [broken] = metrics_of(tmp_path / "run")
    assert broken["step"] == 1 and math.isnan(broken["loss"]), "the figures that stopped it are there to be looked at"
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def huge(completion_ids: list[list[int]]) -> list[float | None]:
    return [1e10 * ids[0] for ids in completion_ids]


def test_a_model_that_an_update_broke_is_not_sampled_from(values: dict[str, Any], tmp_path: Path) -> None:
    values["rewards"] = [{"function": "length", "args": {"target": 3}}]
    with pytest.raises(TrainingError, match="the policy's log-probabilities are not finite"):
        trained_run(tmp_path / "run", values, learning_rate=1e30, max_steps=10)


def test_a_reward_that_is_not_finite_stops_the_training_by_name(values: dict[str, Any], tmp_path: Path) -> None:
    values["rewards"] = [{"function": "tests.grpo_core.training.test_loop:undefined"}]
    with pytest.raises(RewardError, match="reward 'undefined' returned nan for prompt"):
        trained_run(tmp_path / "run", values)


def undefined(completions: list[str]) -> list[float | None]:
    return [float("nan")] * len(completions)
